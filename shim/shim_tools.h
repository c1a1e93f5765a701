/* Text, numbers, files and messages without allocation: what both halves of the shim use. */
#ifndef SHIM_TOOLS_H
#define SHIM_TOOLS_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    LINE_BYTES = 4096, /* LISTED_MAX entries of 12 characters and a head */
    JOB_FDS = 4        /* stdin, stdout, stderr, memfd */
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t now_ms(void) { return now_ns() / 1000000; }

/* For a time to come: rounded down it would come up to a millisecond early. */
static int64_t now_ms_up(void) { return (now_ns() + 999999) / 1000000; }

struct line {
    size_t used;
    char text[LINE_BYTES];
};

static void put_char(struct line *line, char c)
{
    if (line->used < sizeof line->text - 1)
        line->text[line->used++] = c;
    line->text[line->used] = '\0';
}

static void put(struct line *line, const char *text)
{
    while (*text)
        put_char(line, *text++);
}

static void put_number(struct line *line, int64_t value)
{
    char digits[24];
    size_t count = 0;
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;

    if (value < 0)
        put_char(line, '-');
    do
        digits[count++] = (char)('0' + rest % 10);
    while (rest /= 10);
    while (count)
        put_char(line, digits[--count]);
}

static void put_word_number(struct line *line, int64_t value)
{
    put_char(line, ' ');
    put_number(line, value);
}

/* Reads a decimal number; *text is left after it. False if there is no digit or it is too big. */
static bool take_number(const char **text, int64_t *value)
{
    const char *at = *text;
    uint64_t number = 0;

    for (; *at >= '0' && *at <= '9'; at++) {
        if (number > INT64_MAX / 10 - 1)
            return false;
        number = number * 10 + (uint64_t)(*at - '0');
    }
    if (at == *text)
        return false;
    *text = at;
    *value = (int64_t)number;
    return true;
}

static ssize_t read_file(const char *path, char *buffer, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got;

    if (fd < 0)
        return -1;
    do
        got = read(fd, buffer, size - 1);
    while (got < 0 && errno == EINTR);
    close(fd);
    if (got >= 0)
        buffer[got] = '\0';
    return got;
}

/* Calls `each` with every entry of a directory whose name is a number. opendir() would allocate.
 * False if the directory cannot be read. */
static int listing_fd; /* for close_one(), which must not close the list it is called from */

static bool each_number_in(const char *path, void (*each)(int number, void *context), void *context)
{
    struct entry { /* linux_dirent64 */
        uint64_t inode;
        int64_t offset;
        uint16_t length;
        uint8_t type;
        char name[1];
    };
    _Alignas(struct entry) char buffer[4096];
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long got;

    if (fd < 0)
        return false;
    listing_fd = fd;
    while ((got = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0) {
        for (long at = 0; at < got;) {
            const char *name = buffer + at + offsetof(struct entry, name);
            uint16_t length;
            int64_t number;

            memcpy(&length, buffer + at + offsetof(struct entry, length), sizeof length);
            at += length;
            if (take_number(&name, &number) && *name == '\0' && number <= INT_MAX)
                each((int)number, context);
        }
    }
    close(fd);
    return got == 0;
}

/* One message with its descriptors. `fds` gets at most JOB_FDS, all close-on-exec; more than
 * that, or more than this process may open, is *fd_count = -1 and none stays open. */
static ssize_t receive(int socket, int flags, char *text, size_t size, int *fds, int *fd_count)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * JOB_FDS)];
        struct cmsghdr aligned;
    } control;
    struct iovec part = {.iov_base = text, .iov_len = size - 1};
    struct msghdr message;
    struct cmsghdr *rights;
    ssize_t got;

    memset(&message, 0, sizeof message);
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    /* Not sizeof: its padding has room for one more descriptor than `fds`. */
    message.msg_controllen = CMSG_LEN(sizeof(int) * JOB_FDS);
    *fd_count = 0;
    got = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
    if (got < 0)
        return got;
    text[got] = '\0';
    rights = CMSG_FIRSTHDR(&message); /* the only kind that can come, for we asked for no other */
    if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
        *fd_count = (int)((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(rights), (size_t)*fd_count * sizeof(int));
    }
    if (message.msg_flags & MSG_CTRUNC) {
        for (int i = 0; i < *fd_count; i++)
            close(fds[i]);
        *fd_count = -1;
    }
    return got;
}

static bool pass_on(int socket, const int *fds, int fd_count)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * JOB_FDS)];
        struct cmsghdr aligned;
    } control;
    struct iovec part = {.iov_base = (char[]){'j'}, .iov_len = 1};
    struct msghdr message;
    struct cmsghdr *rights;

    memset(&message, 0, sizeof message);
    memset(&control, 0, sizeof control);
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)fd_count);
    rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)fd_count);
    memcpy(CMSG_DATA(rights), fds, sizeof(int) * (size_t)fd_count);
    return sendmsg(socket, &message, MSG_NOSIGNAL) >= 0;
}

#endif
