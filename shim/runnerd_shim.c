/* runnerd-shim: stands between runnerd and one command.
 *
 * INTERFACE
 *   No arguments, an empty environment, two descriptors:
 *     3  control   one end of a SOCK_SEQPACKET pair; one text line per message, both ways
 *     4  lifeline  one end of a SOCK_STREAM pair shared by all shims; only its end means anything
 *   It forks the process that will become the command at once, says `parked`, and waits.
 *
 *   From runnerd: `job` (with descriptors: stdin, stdout, stderr, the job's memfd, and a
 *   cgroup.procs if the job says so), `signal N command|group|tree`, `end GRACE_MS`.
 *   To runnerd: parked, failed, oom-adj, started, exited, signalled, ending, termed, killing,
 *   killed, survivors, empty. README.md lists their words; runnerd/protocol/shimwire.py parses them, and
 *   runnerd/protocol/job.py writes the memfd. Those two and this file change together.
 *
 * RULES
 *   1. A command's argv, environment and secrets pass through the child alone: the shim hands the
 *      descriptors on unread, so nothing of a command shows in the shim's /proc entries.
 *   2. No signal goes to a number that is not proven: a direct child that only we can reap, or a
 *      pidfd whose process was checked, after it was opened, for its start time and its ancestry.
 *   3. The exit is told before the leader is reaped. If the shim dies in between, the status is
 *      still there for runnerd, which adopts the zombie.
 *   4. Nothing waits for ever on runnerd: neither a full control socket nor a dead peer.
 *   5. No allocation, no stdio, no locks, no locale: the shim works when memory and pids are gone.
 *
 * EXIT CODES
 *   0 nothing of the command is left; 100 descriptor 3 is no socket; 111 a system call it cannot
 *   do without failed (said as `failed setup ERRNO` or `failed fork ERRNO` where it can be said).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Headers older than the kernel lack these; the numbers are the same on every architecture. */
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef PR_CAP_AMBIENT
#define PR_CAP_AMBIENT 47
#define PR_CAP_AMBIENT_IS_SET 1
#define PR_CAP_AMBIENT_CLEAR_ALL 4
#endif

/* A build for the tests gives another name here, to exercise the scan of /proc. */
#ifndef CHILDREN_FILE
#define CHILDREN_FILE "children"
#endif

enum {
    CONTROL_FD = 3,
    LIFELINE_FD = 4,
    FIRST_OTHER_FD = 5,

    JOB_FDS_MIN = 4, /* stdin, stdout, stderr, memfd */
    JOB_FDS_MAX = 5, /* and a cgroup.procs */

    HANG_UP_GRACE_MS = 1500, /* runnerd's own stop kills at 1.5 s and is gone at 2.0 s */
    KILL_BOUND_MS = 1000,    /* rounds of KILL until what is left is called a survivor */
    KILL_HOLD_MS = 100,      /* without news, until the dead are reaped though others are dying */
    KILL_ROUND_MS = 2,       /* between rounds, unless a child's end wakes us sooner */
    SURVIVOR_ROUND_MS = 1000,
    SEND_WAIT_MS = 100,  /* the first time the control socket is full; after that, no wait */
    LEAVE_WAIT_MS = 1000, /* then the unreaped leader is left to runnerd */
    TEXT_BUSY_MS = 900,  /* ETXTBSY: another thread's fork still holds the program open */

    TREE_MAX = 32768, /* processes in one round; later rounds of KILL take the rest */
    KILLED_SLOTS = 65536,
    LISTED_MAX = 200, /* entries in a receipt; its total counts all */
    LINE_BYTES = 8192,
    SIGNAL_MAX = 64
};

/* ------------------------------------------------------------------ what the child reports */

enum stage { PARKED, JOB, CGROUP, SESSION, RLIMIT, UMASK, NICE, GROUPS, USER, CWD, STREAMS, EXEC };

static const char *const stage_names[] = {"killed", "job",  "cgroup", "session", "rlimit",  "umask",
                                          "nice",   "groups", "user", "cwd",     "streams", "exec"};

/* Lives in a page shared by shim and child, since the child has no other voice that an execve
 * would not have to be told apart from. The child writes, and the shim reads only after the end
 * of the internal socket, so no field needs more than volatile. */
struct report {
    int stage;
    int failed_errno; /* not 0: it failed at `stage` */
    int interpreter_missing;
    int oom_errno;
    int oom_known;
    int oom_score_adj;
};
static volatile struct report *report;

/* ----------------------------------------------------------------------------- small tools */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t now_ms(void) { return now_ns() / 1000000; }

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

/* One message with its descriptors. `fds` gets at most JOB_FDS_MAX, all close-on-exec; more than
 * that, or more than this process may open, is *fd_count = -1 and none stays open. */
static ssize_t receive(int socket, int flags, char *text, size_t size, int *fds, int *fd_count)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * JOB_FDS_MAX)];
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
    message.msg_controllen = CMSG_LEN(sizeof(int) * JOB_FDS_MAX);
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
        char bytes[CMSG_SPACE(sizeof(int) * JOB_FDS_MAX)];
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

/* ------------------------------------------------------------------- the job, in the child */

/* The memfd: this header, rlimit_count rlimits, group_count 32-bit gids, then cwd, argv and
 * environment as NUL-terminated strings, and nothing after them. Numbers are in host order. */
struct job_header {
    char magic[4]; /* "rjob" */
    uint32_t version;
    uint64_t total_bytes;
    uint32_t flags;
    uint32_t umask;
    int32_t nice;
    int32_t oom_score_adj;
    uint32_t uid, gid;
    uint32_t group_count, rlimit_count, argc, envc;
    uint64_t reserved; /* 0 */
};

struct job_rlimit {
    uint64_t resource, soft, hard;
};

enum {
    JOB_VERSION = 1,
    HAS_USER = 1 << 0,
    HAS_NICE = 1 << 1,
    HAS_OOM_SCORE_ADJ = 1 << 2,
    NO_NEW_PRIVS = 1 << 3,
    CONTROLLING_TERMINAL = 1 << 4,
    HAS_CGROUP = 1 << 5, /* the message carries a fifth descriptor, a writable cgroup.procs */
    FLAGS_KNOWN = (1 << 6) - 1,
    GROUPS_MAX = 65536, /* NGROUPS_MAX */
    RLIMITS_MAX = 64
};

struct job {
    const struct job_header *head;
    const struct job_rlimit *rlimits;
    const uint32_t *groups;
    char *cwd, **argv, **envp;
};

static _Noreturn void child_fail(int error)
{
    report->failed_errno = error ? error : EIO;
    _exit(127);
}

static void child_check(long result)
{
    if (result < 0)
        child_fail(errno);
}

static void job_check(bool holds)
{
    if (!holds)
        child_fail(EINVAL);
}

/* runnerd is trusted, its arithmetic is not: every length is checked against the file's size. */
static struct job job_map(int memfd)
{
    struct stat file;
    struct job job;
    const struct job_header *head;
    uint64_t fixed_bytes, string_count;
    char *bytes, *string, *end, **pointers;

    child_check(fstat(memfd, &file));
    job_check(file.st_size > (off_t)sizeof *head);
    /* Private and writable, because execve() takes char *const[] and nothing may write back. */
    bytes = mmap(NULL, (size_t)file.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, memfd, 0);
    child_check(bytes == MAP_FAILED ? -1 : 0);
    end = bytes + file.st_size;
    job.head = head = (const struct job_header *)(void *)bytes;
    job_check(memcmp(head->magic, "rjob", 4) == 0 && head->version == JOB_VERSION);
    job_check(head->total_bytes == (uint64_t)file.st_size && head->reserved == 0);
    job_check((head->flags & ~(uint32_t)FLAGS_KNOWN) == 0 && head->argc >= 1);
    job_check(head->group_count <= GROUPS_MAX && head->rlimit_count <= RLIMITS_MAX);
    fixed_bytes = sizeof *head + head->rlimit_count * sizeof(struct job_rlimit) +
                  head->group_count * sizeof(uint32_t);
    job_check(fixed_bytes < head->total_bytes && end[-1] == '\0');
    job.rlimits = (const struct job_rlimit *)(const void *)(head + 1);
    job.groups = (const uint32_t *)(const void *)(job.rlimits + head->rlimit_count);

    string = bytes + fixed_bytes;
    string_count = (uint64_t)head->argc + head->envc;
    job_check(string_count < (uint64_t)(end - string)); /* each takes at least its NUL */
    pointers = mmap(NULL, (string_count + 2) * sizeof *pointers, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    child_check(pointers == MAP_FAILED ? -1 : 0);
    job.cwd = string;
    job.argv = pointers;
    job.envp = pointers + head->argc + 1; /* the two NULLs between and after are there already */
    for (uint64_t i = 0; i < string_count; i++) {
        string += strlen(string) + 1;
        job_check(string < end);
        pointers[i < head->argc ? i : i + 1] = string;
    }
    job_check(string + strlen(string) + 1 == end);
    return job;
}

/* Whatever our parents ignore or block, the command must get back. The libcs refuse their own
 * real-time signals 32 to 34 here, so the kernel is asked. */
static void child_reset_signals(void)
{
    const char zeroes[64] = {0}; /* a kernel sigaction of SIG_DFL, without flags, on any machine */

    for (int n = 1; n <= SIGNAL_MAX; n++)
        syscall(SYS_rt_sigaction, n, zeroes, NULL, 8); /* KILL and STOP say EINVAL */
}

static bool read_score(int fd, int64_t *score)
{
    char text[32];
    const char *at = text;
    ssize_t got = pread(fd, text, sizeof text - 1, 0);
    bool negative;

    if (got <= 0)
        return false;
    text[got] = '\0';
    negative = *at == '-';
    at += negative;
    if (!take_number(&at, score))
        return false;
    *score = negative ? -*score : *score;
    return true;
}

/* Raises the score to `wanted`, never lowers a higher one. A refusal is told, not an error: some
 * sandboxes make /proc read-only, and a command that runs is better than none.
 *
 * A process that is not dumpable has its /proc files owned by root. A daemon running as root can
 * write them all the same; only where that fails is the child made dumpable for the moment of the
 * open. What could trace it then is its own user, who can trace the command after execve anyway. */
static void child_raise_oom_score(bool asked, int wanted)
{
    const char *path = "/proc/self/oom_score_adj";
    int mode = (asked ? O_RDWR : O_RDONLY) | O_CLOEXEC, fd = open(path, mode);
    struct line line = {.used = 0};
    int64_t score;

    if (fd < 0 && errno == EACCES && prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0) {
        fd = open(path, mode);
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    }
    if (fd < 0) {
        report->oom_errno = asked ? errno : 0;
        fd = open(path, O_RDONLY | O_CLOEXEC);
        asked = false;
    }
    if (asked && read_score(fd, &score) && score < wanted) {
        put_number(&line, wanted);
        if (write(fd, line.text, line.used) < 0)
            report->oom_errno = errno;
    }
    if (read_score(fd, &score)) {
        report->oom_score_adj = (int)score;
        report->oom_known = 1;
    }
    close(fd);
}

/* The kernel drops capabilities by itself only when a uid leaves 0, and keeps ambient and
 * inheritable ones in cases of their own. So they are dropped here and then looked for. For a
 * target of uid 0 they are left alone: execve would hand them all back to root anyway. */
static void child_drop_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];

    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); /* kernels before 4.3 have none */
    memset(sets, 0, sizeof sets);
    child_check(syscall(SYS_capset, &header, sets));
    memset(sets, 0xff, sizeof sets);
    child_check(syscall(SYS_capget, &header, sets));
    for (int i = 0; i < _LINUX_CAPABILITY_U32S_3; i++)
        if (sets[i].effective | sets[i].permitted | sets[i].inheritable)
            child_fail(EPERM);
    for (unsigned long capability = 0; capability < 64; capability++)
        if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, capability, 0, 0) > 0)
            child_fail(EPERM);
}

/* System calls and not the libc's wrappers, which take locks to tell other threads. */
static void child_become(const struct job *job)
{
    const struct job_header *head = job->head;

    /* As an argument of these calls -1 means "unchanged": the command would stay what we are. */
    report->stage = GROUPS;
    job_check(head->gid != UINT32_MAX);
    child_check(syscall(SYS_setgroups, (size_t)head->group_count, job->groups));
    child_check(syscall(SYS_setresgid, head->gid, head->gid, head->gid));
    report->stage = USER;
    job_check(head->uid != UINT32_MAX);
    child_check(syscall(SYS_setresuid, head->uid, head->uid, head->uid));
    if (head->uid != 0)
        child_drop_capabilities();
}

/* One execve, repeated while another process still has the program open for writing: a forked
 * child of whoever wrote it holds such a descriptor until its own execve. */
static void child_execve(const char *path, const struct job *job)
{
    int64_t give_up_ms = now_ms() + TEXT_BUSY_MS;
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = 5000000};

    do {
        execve(path, job->argv, job->envp);
        if (errno != ETXTBSY)
            break;
        nanosleep(&pause, NULL);
        errno = ETXTBSY;
    } while (now_ms() < give_up_ms);
    if (errno == ENOENT) {
        /* And yet there: then the interpreter of a script or the loader of a program is missing. */
        if (access(path, F_OK) == 0)
            report->interpreter_missing = 1;
        errno = ENOENT;
    }
}

/* The search of execvp(3), along the command's own PATH, without its fallback to a shell. */
static _Noreturn void child_exec(const struct job *job)
{
    const char *name = job->argv[0], *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    size_t name_bytes = strlen(name);
    bool denied = false;
    char candidate[PATH_MAX];

    if (strchr(name, '/')) {
        child_execve(name, job);
        child_fail(errno);
    }
    if (name_bytes == 0)
        child_fail(ENOENT);
    if (name_bytes > NAME_MAX)
        child_fail(ENAMETOOLONG);
    for (char **at = job->envp; *at; at++)
        if (strncmp(*at, "PATH=", 5) == 0) {
            path = *at + 5;
            break;
        }
    for (;;) {
        size_t bytes = strcspn(path, ":");

        if (bytes + name_bytes + 2 <= sizeof candidate) {
            /* An empty element is the current directory, as in every shell. */
            memcpy(candidate, path, bytes);
            candidate[bytes] = '/';
            memcpy(candidate + bytes + (bytes > 0), name, name_bytes + 1);
            child_execve(candidate, job);
            if (errno == EACCES)
                denied = true;
            else if (errno != ENOENT && errno != ENOTDIR && errno != ESTALE && errno != ENODEV &&
                     errno != ETIMEDOUT)
                child_fail(errno);
        }
        if (path[bytes] == '\0')
            break;
        path += bytes + 1;
    }
    child_fail(denied ? EACCES : ENOENT);
}

static void child_set_up(const struct job *job, const int *fds)
{
    const struct job_header *head = job->head;

    if (head->flags & HAS_CGROUP) {
        report->stage = CGROUP;
        child_check(write(fds[4], "0", 1));
    }
    report->stage = SESSION;
    child_check(setsid());
    if (head->flags & CONTROLLING_TERMINAL)
        child_check(ioctl(fds[0], TIOCSCTTY, 0));
    child_raise_oom_score(head->flags & HAS_OOM_SCORE_ADJ, head->oom_score_adj);
    report->stage = RLIMIT;
    for (uint32_t i = 0; i < head->rlimit_count; i++) {
        const struct job_rlimit *rlimit = &job->rlimits[i];
        child_check(syscall(SYS_prlimit64, 0, rlimit->resource, &rlimit->soft, NULL));
    }
    report->stage = UMASK;
    job_check(head->umask <= 0777);
    umask((mode_t)head->umask);
    report->stage = NICE;
    if (head->flags & HAS_NICE)
        child_check(setpriority(PRIO_PROCESS, 0, head->nice));
    if (head->flags & HAS_USER)
        child_become(job);
    if (head->flags & NO_NEW_PRIVS)
        child_check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    report->stage = CWD;
    child_check(chdir(job->cwd)); /* as the user, who may be allowed less than we are */
    report->stage = STREAMS;
    for (int fd = 0; fd <= 2; fd++)
        child_check(dup2(fds[fd], fd)); /* fds are all above 2, for 0 to 2 were filled */
}

static _Noreturn void child_main(int job_socket)
{
    char text[16];
    int fds[JOB_FDS_MAX], fd_count;
    ssize_t got;
    struct job job;
    sigset_t none;

    do
        got = receive(job_socket, 0, text, sizeof text, fds, &fd_count);
    while (got < 0 && errno == EINTR);
    if (got <= 0)
        _exit(0); /* the shim is gone, and so is the reason to wait */
    report->stage = JOB;
    if (fd_count < JOB_FDS_MIN)
        child_fail(fd_count < 0 ? EMFILE : EINVAL);
    child_reset_signals();
    job = job_map(fds[3]);
    job_check((job.head->flags & HAS_CGROUP ? JOB_FDS_MAX : JOB_FDS_MIN) == fd_count);
    child_set_up(&job, fds);
    report->stage = EXEC;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    child_exec(&job);
}

/* ---------------------------------------------------------------------------- the shim's state */

enum phase { WAITING, STARTING, STARTED, FAILED };
enum ladder { AT_REST, GRACE, KILLING, SURVIVING };

static pid_t self, leader;
static int job_socket = -1; /* -1 once its end was seen */
static enum phase phase = WAITING;
static bool leader_reaped, exit_unsent;
static int64_t exit_unsent_ms;
static bool childless; /* ECHILD: nothing is left, for every orphan comes to a subreaper */
static enum ladder ladder = AT_REST;
static int64_t kill_at_ms, survivors_at_ms, round_at_ms;
static int64_t hold_until_ms; /* not 0: the dead are kept, see kill_round() */
static bool control_open = true, control_full;

/* True if runnerd has it, or is gone and nobody can have it. False only if the socket stayed full:
 * the first time that is waited out for SEND_WAIT_MS, later not at all, for a runnerd that reads
 * nothing must not delay the end of a tree. */
static bool say(const struct line *line)
{
    struct pollfd writable = {.fd = CONTROL_FD, .events = POLLOUT};

    for (int tries = 0; control_open; tries++) {
        if (send(CONTROL_FD, line->text, line->used, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
            control_full = false;
            return true;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM)
            return true;
        if (control_full || tries > 0) {
            control_full = true;
            return false;
        }
        poll(&writable, 1, SEND_WAIT_MS);
    }
    return true;
}

static void say_failed(const char *stage, int error, bool interpreter)
{
    struct line line = {.used = 0};

    put(&line, "failed ");
    put(&line, stage);
    put_word_number(&line, error);
    if (interpreter)
        put(&line, " interpreter");
    say(&line);
}

/* ------------------------------------------------------------------------------------ the tree */

struct process {
    pid_t pid, parent, group, session;
    char state, found; /* found: 'c' by children files, 'p' by a scan of /proc */
    bool proven; /* ours, by signal_process() in this list */
    uint32_t flags;
    uint64_t start; /* clock ticks since boot */
    const struct process *listed_parent; /* in `tree`; NULL for our own children and in a scan */
};

/* Static and never touched beyond what is used, so a small tree costs a page or two. */
static struct process tree[TREE_MAX];
static size_t tree_count;
static const struct process *tree_parent; /* whose children are being added */

static void proc_path(struct line *path, pid_t pid, const char *rest)
{
    path->used = 0;
    put(path, "/proc/");
    put_number(path, pid);
    put(path, rest);
}

/* Fields of proc_pid_stat(5), counted from the last ')' because a command chooses its own name. */
static bool read_process(pid_t pid, struct process *process)
{
    struct line path;
    char text[1024], *at;
    int64_t field[23] = {0};

    proc_path(&path, pid, "/stat");
    if (read_file(path.text, text, sizeof text) <= 0)
        return false;
    at = strrchr(text, ')');
    if (!at || at[1] != ' ' || at[2] == '\0')
        return false;
    process->state = at[2];
    at += 3;
    for (int i = 4; i <= 22; i++) {
        const char *number;
        bool negative;

        if (*at != ' ')
            return false;
        negative = at[1] == '-';
        number = at + 1 + negative;
        if (!take_number(&number, &field[i]))
            return false;
        at += number - at;
        field[i] = negative ? -field[i] : field[i];
    }
    process->pid = pid;
    process->parent = (pid_t)field[4];
    process->group = (pid_t)field[5];
    process->session = (pid_t)field[6];
    process->flags = (uint32_t)field[9];
    process->start = (uint64_t)field[22];
    return true;
}

static bool tree_has(pid_t pid)
{
    for (size_t i = 0; i < tree_count; i++)
        if (tree[i].pid == pid)
            return true;
    return false;
}

static void tree_add(pid_t pid, char found)
{
    struct process *process = &tree[tree_count];

    if (tree_count >= TREE_MAX || pid <= 1 || pid == self || !read_process(pid, process))
        return;
    process->found = found;
    process->proven = false;
    process->listed_parent = tree_parent;
    tree_count++;
}

/* Calls `each` with the children of one thread. False if there is no such file: the process is
 * gone, or the kernel was built without it. */
static bool each_child(pid_t pid, pid_t tid, void (*each)(pid_t child))
{
    struct line path;
    char buffer[4096];
    int64_t child = 0;
    ssize_t got;
    int fd;

    proc_path(&path, pid, "/task/");
    put_number(&path, tid);
    put(&path, "/" CHILDREN_FILE);
    fd = open(path.text, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    while ((got = read(fd, buffer, sizeof buffer)) > 0)
        for (ssize_t i = 0; i < got; i++) {
            if (buffer[i] >= '0' && buffer[i] <= '9') {
                child = child * 10 + (buffer[i] - '0');
            } else if (child > 0) { /* each number is followed by a space */
                each((pid_t)child);
                child = 0;
            }
        }
    close(fd);
    return true;
}

static void tree_add_child(pid_t pid) { tree_add(pid, 'c'); }

static void tree_add_new_child(pid_t pid)
{
    if (!tree_has(pid))
        tree_add(pid, 'c');
}

static void tree_add_thread(int tid, void *context)
{
    each_child(*(const pid_t *)context, tid, tree_add_child);
}

static void tree_scan_one(int pid, void *context)
{
    (void)context;
    tree_add(pid, 'p');
}

static const struct process *tree_find_sorted(pid_t pid, size_t count)
{
    size_t low = 0, high = count;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (tree[middle].pid < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && tree[low].pid == pid ? &tree[low] : NULL;
}

static bool tree_descends(const struct process *process, size_t count)
{
    for (int depth = 0; process && depth < TREE_MAX; depth++) {
        if (process->parent == self)
            return true;
        process = tree_find_sorted(process->parent, count);
    }
    return false;
}

/* Without children files: all of /proc (in order of pid, as the kernel lists it), then those kept
 * whose line of parents leads here. 0.5 ms for 60 processes against 0.05 ms for a small tree. */
static bool tree_scan(void)
{
    size_t all, kept = 0;

    if (!each_number_in("/proc", tree_scan_one, NULL))
        return false;
    all = tree_count;
    for (size_t i = 0; i < all; i++) /* state 'x': not ours; the order must stay while we look */
        tree[i].found = tree_descends(&tree[i], all) ? 'p' : 'x';
    for (size_t i = 0; i < all; i++)
        if (tree[i].found != 'x')
            tree[kept++] = tree[i];
    tree_count = kept;
    return true;
}

static void tree_walk_from(size_t first)
{
    struct line path;

    for (size_t i = first; i < tree_count; i++) {
        tree_parent = &tree[i];
        proc_path(&path, tree[i].pid, "/task");
        each_number_in(path.text, tree_add_thread, &tree[i].pid);
    }
    tree_parent = NULL;
}

/* Lists every living or unreaped descendant. A parent that dies during the walk hands its children
 * to us behind our back, so our own list is read again until it brings nothing new. */
static bool tree_list(void)
{
    size_t before;

    tree_count = 0;
    if (!each_child(self, self, tree_add_child))
        return tree_scan();
    tree_walk_from(0);
    for (int again = 0; again < 3; again++) {
        before = tree_count;
        each_child(self, self, tree_add_new_child);
        if (tree_count == before)
            break;
        tree_walk_from(before);
    }
    return true;
}

/* Whether this very process still descends from us. Each link is read, then its parent, then the
 * link again: had the parent died in between, the child would have another one by now. For the same
 * reason one link is enough where it leads to the listed parent and that one was proven already. */
static bool still_ours(const struct process *process)
{
    struct process child, parent, again;

    if (!read_process(process->pid, &child) || child.start != process->start)
        return false;
    if (process->listed_parent && process->listed_parent->proven &&
        process->listed_parent->pid == child.parent)
        return true;
    for (int depth = 0; depth < TREE_MAX; depth++) {
        if (child.parent == self)
            return true;
        if (child.parent <= 1 || !read_process(child.parent, &parent))
            return false;
        if (!read_process(child.pid, &again) || again.start != child.start ||
            again.parent != child.parent)
            return false;
        child = parent;
    }
    return false;
}

/* Sends one or two signals (0: none) to one process of the list. 0, or an errno; ESRCH also for
 * what is dead already or not provably ours. */
static int signal_process(struct process *process, int first, int second)
{
    int fd = -1, error = 0;

    if (process->pid <= 1 || process->pid == self || process->state == 'Z' || process->state == 'X')
        return ESRCH;
    if (process->parent != self) {
        fd = (int)syscall(SYS_pidfd_open, process->pid, 0);
        if (fd < 0 && errno == ESRCH)
            return ESRCH;
        if (!still_ours(process)) {
            if (fd >= 0)
                close(fd);
            return ESRCH;
        }
    }
    process->proven = true;
    /* A direct child keeps its number until we reap it, and we do not reap between list and here.
     * Where a kernel or a seccomp filter has no pidfds, the check just made must do for others. */
    if (fd < 0 || syscall(SYS_pidfd_send_signal, fd, first, NULL, 0) < 0) {
        if (fd >= 0 && errno == ESRCH)
            error = ESRCH;
        else if (kill(process->pid, first) < 0)
            error = errno;
    }
    if (!error && second && (fd < 0 || syscall(SYS_pidfd_send_signal, fd, second, NULL, 0) < 0))
        if (fd < 0 || errno != ESRCH)
            kill(process->pid, second);
    if (fd >= 0)
        close(fd);
    return error;
}

static void put_process(struct line *line, const struct process *process)
{
    put_word_number(line, process->pid);
    put_char(line, ':');
    put_char(line, process->group == leader ? 'g' : process->session == leader ? 's' : 'x');
    put_char(line, ':');
    put_char(line, process->found);
}

/* ---------------------------------------------------------------------------------- the ladder */

static struct process killed[LISTED_MAX];
static int64_t killed_total;
static struct {
    pid_t pid;
    uint64_t start;
} killed_slot[KILLED_SLOTS];

/* Counts each process once, however many rounds meet it before it is gone. */
static void note_killed(const struct process *process)
{
    size_t slot = (size_t)process->pid % KILLED_SLOTS;

    for (size_t i = 0; i < KILLED_SLOTS && killed_slot[slot].pid; i++) {
        if (killed_slot[slot].pid == process->pid && killed_slot[slot].start == process->start)
            return;
        slot = (slot + 1) % KILLED_SLOTS;
    }
    killed_slot[slot].pid = process->pid;
    killed_slot[slot].start = process->start;
    if (killed_total < LISTED_MAX)
        killed[killed_total] = *process;
    killed_total++;
}

static void kill_child_now(pid_t pid)
{
    if (pid <= 1 || (pid == leader && exit_unsent) || kill(pid, SIGKILL) < 0)
        return;
    if (tree_count < TREE_MAX)
        tree[tree_count++].pid = pid;
}

/* KILL to every direct child, before anything is read about any of them: a process that runs from
 * us by forking and exiting becomes our child with each exit, and lives less than a look takes.
 * True if some are not dead yet. */
static bool kill_children(void)
{
    bool dying = false;

    tree_count = 0;
    each_child(self, self, kill_child_now);
    for (size_t i = 0; i < tree_count; i++) {
        pid_t pid = tree[i].pid; /* still itself, for only we can reap it */

        tree[i].found = 'c';
        if (read_process(pid, &tree[i])) {
            note_killed(&tree[i]);
            dying |= tree[i].state != 'Z';
        }
    }
    return dying;
}

/* One round of KILL; true if it met anything new.
 *
 * Direct children, and if they are not all dead already then the whole tree: a killed parent can
 * take long to get the processor it needs to die, and its children come to us only after that. When
 * all our children are dead, nothing is left, since an orphan of the tree is a child of ours.
 *
 * The dead are not reaped as long as rounds bring news: at a limit of pids a fork bomb fills each
 * place that a reap sets free (seen: 246 of 300 still there after a second). */
static bool kill_round(void)
{
    int64_t before = killed_total, now = now_ms();
    bool dying = kill_children();

    if (dying && !tree_list() && !leader_reaped)
        kill(-leader, SIGKILL); /* no /proc at all: the group is what can be reached */
    for (size_t i = 0; dying && i < tree_count; i++)
        if (signal_process(&tree[i], SIGKILL, 0) == 0)
            note_killed(&tree[i]);
    if (killed_total > before)
        hold_until_ms = now + KILL_HOLD_MS;
    else if (!dying || now >= hold_until_ms)
        hold_until_ms = 0;
    return killed_total > before;
}

static void say_killed(void)
{
    struct line line = {.used = 0};

    put(&line, "killed");
    put_word_number(&line, killed_total);
    for (int64_t i = 0; i < killed_total && i < LISTED_MAX; i++)
        put_process(&line, &killed[i]);
    say(&line);
}

static void say_survivors(void)
{
    static struct line said;
    struct line line = {.used = 0}, list = {.used = 0};
    int64_t total = 0;

    tree_list();
    for (size_t i = 0; i < tree_count; i++) {
        int error = signal_process(&tree[i], SIGKILL, 0);

        if (error == ESRCH || ++total > LISTED_MAX)
            continue;
        put_word_number(&list, tree[i].pid);
        put(&list, error == EPERM ? ":user" : tree[i].state == 'D' ? ":D" : ":other");
    }
    put(&line, "survivors");
    put_word_number(&line, total);
    put(&line, list.text);
    if (total == 0 || strcmp(line.text, said.text) == 0)
        return;
    if (say(&line))
        said = line;
}

static void term_round(void)
{
    struct line line = {.used = 0}, list = {.used = 0};
    int64_t total = 0, gone = 0;

    if (!tree_list() && !leader_reaped) {
        kill(-leader, SIGTERM);
        kill(-leader, SIGCONT);
    }
    for (size_t i = 0; i < tree_count; i++) {
        /* CONT, because a stopped process does not see a TERM before it goes on. */
        int error = signal_process(&tree[i], SIGTERM, SIGCONT);

        gone += error == ESRCH;
        if (error == 0 && ++total <= LISTED_MAX)
            put_process(&list, &tree[i]);
    }
    put(&line, "termed");
    put_word_number(&line, total);
    put_word_number(&line, gone);
    put(&line, list.text);
    say(&line);
}

static _Noreturn void leave(void)
{
    struct line line = {.used = 0};

    if (ladder == KILLING)
        say_killed();
    put(&line, "empty");
    say(&line);
    _exit(0);
}

/* Whether TERM meets its default action in the leader: then an exit by code, or a KILL that was
 * not ours, cannot be the answer to it. Fields 32 to 34 of stat are the masks of blocked, ignored
 * and caught signals. */
static bool term_is_default(void)
{
    struct line path;
    char text[1024];
    const char *at;
    int64_t blocked = 0, ignored = 0, caught = 0;
    const int64_t term = (int64_t)1 << (SIGTERM - 1);

    proc_path(&path, leader, "/stat");
    if (read_file(path.text, text, sizeof text) <= 0 || !(at = strrchr(text, ')')))
        return false;
    for (int field = 2; at && field < 32; field++)
        at = strchr(at + 1, ' ');
    if (!at++ || !take_number(&at, &blocked) || *at++ != ' ' || !take_number(&at, &ignored) ||
        *at++ != ' ' || !take_number(&at, &caught))
        return false;
    return !((blocked | ignored | caught) & term);
}

/* What the leader makes of the ladder's first rung; only KILL after it is left, if that was none. */
static const char *leader_word(bool first, bool with_term)
{
    static const char *word = " default";

    if (leader_reaped || exit_unsent)
        return " gone";
    if (first && with_term && !term_is_default())
        word = " caught";
    return word;
}

static void reap(void);

static void end_tree(int64_t grace_ms)
{
    struct line line = {.used = 0};
    int64_t now = now_ms();
    bool first = ladder == AT_REST;

    reap(); /* an exit that came before the end is told before it, and so is nobody's doing */
    if (phase == WAITING)
        grace_ms = 0;
    if (first || (ladder == GRACE && now + grace_ms < kill_at_ms))
        kill_at_ms = now + grace_ms;
    if (first)
        ladder = GRACE;
    put(&line, "ending");
    put_word_number(&line, ladder == GRACE && kill_at_ms > now ? kill_at_ms - now : 0);
    put(&line, leader_word(first, grace_ms > 0));
    say(&line);
    if (phase == WAITING) { /* there is no command yet: the child is ours alone */
        kill(leader, SIGKILL);
        while (waitpid(leader, NULL, 0) < 0 && errno == EINTR)
            ;
        leave();
    }
    if (first && grace_ms > 0)
        term_round();
}

static void climb_ladder(void)
{
    int64_t now = now_ms();

    if (ladder == GRACE && now >= kill_at_ms) {
        struct line line = {.used = 0};

        put(&line, "killing"); /* before the first KILL, so that an exit by it is known as ours */
        say(&line);
        ladder = KILLING;
        survivors_at_ms = now + KILL_BOUND_MS;
    }
    if (ladder == KILLING) {
        round_at_ms = kill_round() ? now : now + KILL_ROUND_MS;
        if (now >= survivors_at_ms) {
            say_killed();
            ladder = SURVIVING;
            round_at_ms = now;
        }
    }
    if (ladder == SURVIVING && now >= round_at_ms) {
        /* What still multiplies is chased on without a pause, what only stays is asked seldom. */
        bool news = kill_round();

        if (now >= survivors_at_ms) {
            say_survivors();
            survivors_at_ms = now + SURVIVOR_ROUND_MS;
        }
        round_at_ms = now + (news ? KILL_ROUND_MS : SURVIVOR_ROUND_MS);
    }
}

/* ------------------------------------------------------------------------- the leader's two ends */

/* The internal socket has ended: execve closed it, or the child died. Before execve a process
 * carries PF_FORKNOEXEC, and execve clears it before it closes anything, so the flag decides, for
 * a zombie too. A dead child without a verdict is told when it is reaped. */
static void start_ended(void)
{
    enum { PF_FORKNOEXEC = 0x40 };
    struct process process;
    struct line line = {.used = 0};

    close(job_socket);
    job_socket = -1;
    if (report->failed_errno) {
        say_failed(stage_names[report->stage], report->failed_errno,
                   report->failed_errno == ENOENT && report->interpreter_missing);
        phase = FAILED;
        return;
    }
    if (report->stage != EXEC || (read_process(leader, &process) && process.flags & PF_FORKNOEXEC))
        return;
    phase = STARTED;
    if (report->oom_errno) {
        put(&line, "oom-adj");
        put_word_number(&line, report->oom_errno);
        say(&line);
        line.used = 0;
    }
    put(&line, "started");
    put_word_number(&line, leader);
    if (report->oom_known)
        put_word_number(&line, report->oom_score_adj);
    else
        put(&line, " -");
    put_word_number(&line, now_ns());
    say(&line);
}

static int64_t microseconds(struct timeval time)
{
    return (int64_t)time.tv_sec * 1000000 + time.tv_usec;
}

static bool say_exited(const siginfo_t *info, const struct rusage *usage)
{
    struct line line = {.used = 0};

    put(&line, info->si_code == CLD_EXITED   ? "exited exit"
               : info->si_code == CLD_DUMPED ? "exited dump"
                                             : "exited kill");
    put_word_number(&line, info->si_status);
    put_word_number(&line, now_ns());
    put_word_number(&line, microseconds(usage->ru_utime));
    put_word_number(&line, microseconds(usage->ru_stime));
    put_word_number(&line, usage->ru_maxrss);
    put_word_number(&line, usage->ru_minflt);
    put_word_number(&line, usage->ru_majflt);
    put_word_number(&line, usage->ru_inblock);
    put_word_number(&line, usage->ru_oublock);
    return say(&line);
}

/* False while runnerd cannot be told, for until then the leader must not be reaped (rule 3). */
static bool leader_ended(const siginfo_t *info, const struct rusage *usage)
{
    if (job_socket >= 0)
        start_ended(); /* a dead child's descriptors are closed, so its end is there to be seen */
    if (phase == STARTED && !say_exited(info, usage))
        return false;
    if (phase == WAITING || phase == STARTING) {
        say_failed("killed", info->si_status, false);
        phase = FAILED;
    }
    while (waitpid(leader, NULL, 0) < 0 && errno == EINTR)
        ;
    leader_reaped = true;
    return true;
}

/* The libcs leave out the fifth argument, the usage of a child that is not reaped yet. */
static int peek(idtype_t whom, siginfo_t *info, struct rusage *usage)
{
    const pid_t pid = whom == P_PID ? leader : 0;

    info->si_pid = 0;
    return (int)syscall(SYS_waitid, whom, pid, info, WEXITED | WNOHANG | WNOWAIT, usage);
}

/* With the exit untold the peek would find the leader for ever, so the others are reaped from a
 * list. When nothing but the leader is left, it is given LEAVE_WAIT_MS and then left to runnerd. */
static void reap_others(void)
{
    size_t others = 0;

    tree_list();
    for (size_t i = 0; i < tree_count; i++) {
        if (tree[i].pid == leader)
            continue;
        if (tree[i].parent != self || waitpid(tree[i].pid, NULL, WNOHANG) <= 0)
            others++;
    }
    if (others == 0 && now_ms() >= exit_unsent_ms + LEAVE_WAIT_MS)
        _exit(0);
}

static void reap(void)
{
    siginfo_t info;
    struct rusage usage;

    if (hold_until_ms && leader_reaped)
        return;
    for (;;) {
        if (peek(hold_until_ms ? P_PID : P_ALL, &info, &usage) < 0) {
            if (errno == EINTR)
                continue;
            childless = errno == ECHILD && !hold_until_ms;
            return;
        }
        if (info.si_pid == 0)
            return;
        if (info.si_pid != leader || leader_reaped) {
            waitpid(info.si_pid, NULL, WNOHANG);
        } else if (leader_ended(&info, &usage)) {
            exit_unsent = false;
        } else {
            if (!exit_unsent)
                exit_unsent_ms = now_ms();
            exit_unsent = true;
            reap_others();
            return;
        }
    }
}

/* ------------------------------------------------------------------------ messages from runnerd */

static void take_job(int *fds, int fd_count)
{
    if (phase == WAITING && fd_count >= JOB_FDS_MIN) {
        pass_on(job_socket, fds, fd_count); /* if that fails the child is dead, and will be reaped */
        phase = STARTING;
    } else if (phase == WAITING) {
        say_failed("job", fd_count < 0 ? EMFILE : EINVAL, false);
        phase = FAILED;
        kill(leader, SIGKILL);
    }
}

static void signal_tree(int number, bool group_only, int64_t *count, int *error)
{
    tree_list();
    for (size_t i = 0; i < tree_count; i++) {
        int refused;

        if (group_only && tree[i].group != leader)
            continue;
        refused = signal_process(&tree[i], number, 0);
        *count += refused == 0;
        if (refused && refused != ESRCH && *error == 0)
            *error = refused;
    }
    if (*count == 0 && *error == 0)
        *error = ESRCH;
}

/* The group as a whole, which a fork cannot slip out of; the list only counts whom it met. */
static void signal_group(int number, int64_t *count, int *error)
{
    if (kill(-leader, number) < 0) {
        *error = errno;
        return;
    }
    tree_list();
    for (size_t i = 0; i < tree_count; i++)
        *count += tree[i].group == leader;
}

static void take_signal(const char *words)
{
    struct line line = {.used = 0};
    int64_t number = 0, count = 0;
    int error = 0;

    if (!take_number(&words, &number) || number < 1 || number > SIGNAL_MAX)
        error = EINVAL;
    else if (phase == WAITING || phase == FAILED)
        error = ESRCH;
    else if (strcmp(words, " command") == 0) {
        error = leader_reaped ? ESRCH : kill(leader, (int)number) < 0 ? errno : 0;
        count = error == 0;
    } else if (strcmp(words, " group") == 0 && !leader_reaped)
        signal_group((int)number, &count, &error);
    else if (strcmp(words, " group") == 0 || strcmp(words, " tree") == 0)
        signal_tree((int)number, words[1] == 'g', &count, &error);
    else
        error = EINVAL;
    put(&line, "signalled");
    put_word_number(&line, number);
    put_word_number(&line, count);
    put_word_number(&line, error);
    say(&line);
}

/* False once there is nothing more to read now. */
static bool take_message(void)
{
    char text[256];
    const char *words = text;
    int fds[JOB_FDS_MAX], fd_count;
    int64_t grace_ms;
    ssize_t got = receive(CONTROL_FD, MSG_DONTWAIT, text, sizeof text, fds, &fd_count);

    if (got < 0)
        /* ECONNRESET: runnerd closed without having read all of ours. What it said before that
         * still comes, and its end after that. */
        return errno == EINTR || errno == ECONNRESET;
    if (got == 0) {
        control_open = false;
        end_tree(HANG_UP_GRACE_MS);
        return false;
    }
    if (strncmp(text, "job", 3) == 0)
        take_job(fds, fd_count);
    else if (strncmp(text, "signal ", 7) == 0)
        take_signal(text + 7);
    else if (strncmp(text, "end ", 4) == 0) {
        words += 4;
        if (take_number(&words, &grace_ms) && *words == '\0')
            end_tree(grace_ms);
    }
    for (int i = 0; i < fd_count; i++)
        close(fds[i]);
    return true;
}

/* --------------------------------------------------------------------------------------- set-up */

static void on_child(int number) { (void)number; }

static void close_one(int fd, void *context)
{
    (void)context;
    if (fd >= FIRST_OTHER_FD && fd != listing_fd)
        close(fd);
}

static void close_others(void)
{
    struct rlimit files;

    if (syscall(SYS_close_range, FIRST_OTHER_FD, ~0U, 0) == 0)
        return;
    /* Not there (before 5.9), or refused by a filter that says EPERM for what it does not know. */
    if (!each_number_in("/proc/self/fd", close_one, NULL) && getrlimit(RLIMIT_NOFILE, &files) == 0)
        for (rlim_t fd = FIRST_OTHER_FD; fd < files.rlim_cur; fd++)
            close((int)fd);
}

static void fill_standard_streams(void)
{
    /* Else a descriptor of the job would land on 0 to 2, and the child would overwrite it. */
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            syscall(SYS_memfd_create, "null", 0);
}

static void set_signals(sigset_t *while_waiting)
{
    const int ignored[] = {SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM};
    struct sigaction action;
    sigset_t blocked;

    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_IGN;
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        sigaction(ignored[i], &action, NULL);
    /* A handler, not SIG_DFL: it is what lets ppoll() be interrupted. An inherited SIG_IGN would
     * have the kernel reap our children unseen. */
    action.sa_handler = on_child;
    action.sa_flags = SA_NOCLDSTOP;
    sigaction(SIGCHLD, &action, NULL);
    sigemptyset(while_waiting); /* whatever was blocked by our parents */
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
}

static _Noreturn void give_up(const char *stage)
{
    say_failed(stage, errno, false);
    _exit(111);
}

static void fork_child(void)
{
    int pair[2];

    report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (report == MAP_FAILED || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        give_up("setup");
    leader = fork();
    if (leader < 0)
        give_up("fork");
    if (leader == 0) {
        close(CONTROL_FD);
        close(LIFELINE_FD);
        close(pair[0]);
        child_main(pair[1]);
    }
    close(pair[1]);
    job_socket = pair[0];
}

static int wait_ms(void)
{
    int64_t until, now = now_ms();

    if (ladder == GRACE)
        until = kill_at_ms;
    else if (ladder != AT_REST)
        until = round_at_ms;
    else if (exit_unsent)
        until = now + LEAVE_WAIT_MS / 4;
    else
        return -1;
    if (exit_unsent && until > now + LEAVE_WAIT_MS / 4)
        until = now + LEAVE_WAIT_MS / 4;
    return until <= now ? 0 : until - now > INT_MAX ? INT_MAX : (int)(until - now);
}

static _Noreturn void run(const sigset_t *while_waiting)
{
    struct pollfd fds[3] = {{.fd = CONTROL_FD, .events = POLLIN},
                            {.fd = LIFELINE_FD, .events = POLLRDHUP}, /* nobody ever writes to it */
                            {.fd = job_socket, .events = POLLIN}};

    for (;;) {
        struct timespec timeout;
        int ms;

        reap();
        if (childless)
            leave();
        climb_ladder();
        ms = wait_ms();
        timeout.tv_sec = ms / 1000;
        timeout.tv_nsec = (long)(ms % 1000) * 1000000;
        fds[0].fd = control_open ? CONTROL_FD : -1;
        fds[0].events = (short)(POLLIN | (exit_unsent ? POLLOUT : 0));
        fds[2].fd = phase == STARTING ? job_socket : -1;
        /* Here alone SIGCHLD can come: a child's end ends the wait, and none slips in before it. */
        if (ppoll(fds, 3, ms < 0 ? NULL : &timeout, while_waiting) <= 0)
            continue;
        if (fds[2].revents)
            start_ended();
        if (fds[0].revents & ~POLLOUT)
            take_message();
        if (fds[1].revents) {
            fds[1].fd = -1;
            end_tree(HANG_UP_GRACE_MS);
        }
    }
}

int main(void)
{
    struct line line = {.used = 0};
    sigset_t while_waiting;
    int type;
    socklen_t type_bytes = sizeof type;

    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* first of all: before anything here is worth stealing */
    fill_standard_streams();
    close_others();
    if (getsockopt(CONTROL_FD, SOL_SOCKET, SO_TYPE, &type, &type_bytes) < 0)
        return 100;
    set_signals(&while_waiting);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* refused: what leaves the tree goes to runnerd */
    prctl(PR_SET_NAME, "runnerd-shim", 0, 0, 0);
    self = getpid();
    fork_child();
    put(&line, "parked");
    put_word_number(&line, leader);
    say(&line);
    run(&while_waiting);
}
