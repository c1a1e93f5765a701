/* The child's half: from a job to execve. Included by runnerd_shim.c alone.
 *
 * From fork() on this process calls nothing that takes a lock or memory, and says how far it came
 * in a page it shares with the shim. The order of the steps is the contract (README.md): each needs
 * rights or secrets that a later one takes away. */
#ifndef SHIM_CHILD_H
#define SHIM_CHILD_H

#include <linux/capability.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "shim_tools.h"

#ifndef PR_CAP_AMBIENT
#define PR_CAP_AMBIENT 47
#define PR_CAP_AMBIENT_IS_SET 1
#define PR_CAP_AMBIENT_CLEAR_ALL 4
#endif

enum { TEXT_BUSY_MS = 900, SIGNAL_MAX = 64 };

enum stage { PARKED, JOB, SESSION, RLIMIT, UMASK, NICE, GROUPS, USER, CWD, STREAMS, EXEC };

static const char *const stage_names[] = {"killed", "job",    "session", "rlimit", "umask",   "nice",
                                          "groups", "user",   "cwd",     "streams", "exec"};

/* Lives in a page shared by shim and child, since the child has no other voice that an execve
 * would not have to be told apart from. The child writes, and the shim reads only after the end
 * of the internal socket, so no field needs more than volatile. */
struct report {
    int stage;
    int hears_term; /* no signal is ignored any more */
    int failed_errno; /* not 0: it failed at `stage` */
    int interpreter_missing;
    int leaf_errno;
    int oom_errno;
    int oom_known;
    int oom_score_adj;
    int64_t execve_ns; /* when: the shim hears of it later, on a busy machine by milliseconds */
};
static volatile struct report *report;

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
    NO_CAPABILITIES = 1 << 5,
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
 * inheritable ones in cases of their own. So they are dropped here and then looked for. runnerd does
 * not ask for it where the command runs as uid 0: execve would hand them all back to root anyway. */
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
}

/* One execve, repeated while another process still has the program open for writing: a forked
 * child of whoever wrote it holds such a descriptor until its own execve. */
static void child_execve(const char *path, const struct job *job)
{
    int64_t give_up_ms = now_ms() + TEXT_BUSY_MS;
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = 5000000};

    do {
        report->execve_ns = now_ns();
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
    const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    const char *name = job->argv[0];
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
    report->stage = USER;
    if (head->flags & NO_CAPABILITIES)
        child_drop_capabilities();
    if (head->flags & NO_NEW_PRIVS)
        child_check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    report->stage = CWD;
    child_check(chdir(job->cwd)); /* as the user, who may be allowed less than we are */
    report->stage = STREAMS;
    for (int fd = 0; fd <= 2; fd++)
        child_check(dup2(fds[fd], fd)); /* fds are all above 2, for 0 to 2 were filled */
}

static _Noreturn void child_main(int job_socket, pid_t shim)
{
    char text[16];
    int fds[JOB_FDS], fd_count;
    ssize_t got;
    struct job job;
    sigset_t none;

    /* A stopped one does not see the end of its socket. Taken back as soon as it has a job, for a
     * command outlives its shim. The shim is one thread, so its parent ends with the shim. */
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != shim)
        _exit(0); /* it was gone before */
    do
        got = receive(job_socket, 0, text, sizeof text, fds, &fd_count);
    while (got < 0 && errno == EINTR);
    if (got <= 0)
        _exit(0); /* the shim is gone, and so is the reason to wait */
    prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
    report->stage = JOB;
    if (fd_count != JOB_FDS)
        child_fail(EMFILE); /* as many were sent */
    child_reset_signals();
    report->hears_term = 1;
    job = job_map(fds[3]);
    child_set_up(&job, fds);
    report->stage = EXEC;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    child_exec(&job);
}

#endif
