/* guard.so: holds the stop deadline of the daemon, whatever state Python is in.
 *
 * WHY NATIVE. Once a stop begins the process must be gone, with the intended code, two seconds
 * later. Tried and not enough: a Python thread in sigwait() (a regular expression that already had
 * the GIL kept it from running for 14 s; os.posix_spawn keeps the GIL through a slow execve), and a
 * SIGEV_THREAD timer (at the pids limit glibc cannot make its thread). So: handlers that need no
 * GIL, no memory, no lock and no new thread, and a timer that exists from boot on.
 *
 * No libc and no Python API, so that one build serves glibc and musl and every Python; ctypes
 * loads it. Linux guarantees what is used here from inside a signal handler: system calls.
 *
 * USE, once per process, from Python through ctypes:
 *   guard_setup(lifeline_fd, wake_fd, deadline_ns)  0, or -errno. wake_fd must not block.
 *   guard_hold()            0, or -errno. Installs the handlers again, for when Python has put one of
 *                           its own in their place; guard_setup has done so once.
 *   guard_park()            never returns: one thread, started at boot, stays here, so that these
 *                           signals find a thread even while the main one blocks them in a spawn.
 *   guard_arm(code, cause)  begins the deadline for a cause other than a signal. 1: this call won,
 *                           0: it had begun before; the first code and cause stand.
 * and read at any time: guard_armed (1 once code and cause are set), guard_code, guard_cause (a
 * signal's number, or what guard_arm was given), guard_armed_ns (when, CLOCK_MONOTONIC: a loop that
 * hears of it late still knows what is left of the deadline), guard_refused_pid,
 * guard_refused_signal, guard_refused_total; and of the signal that began the stop, where
 * guard_sender_known: guard_sender_pid, guard_sender_uid, guard_sender_comm. A byte comes out of wake_fd's other end whenever one of them has changed.
 *
 * Not covered: uninterruptible sleep, a stopped (SIGSTOP) daemon, SIGKILL.
 */
#include "guard_sys.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    HUP = 1, INT = 2, QUIT = 3, TERM = 15,
    DEADLINE_SIGNAL = 62, /* SIGRTMAX - 2: no libc, Python or trio uses it */
    SET_MASK = 2,         /* SIG_SETMASK */
    BOTH_WAYS = 2,        /* SHUT_RDWR */
    MONOTONIC = 1,        /* CLOCK_MONOTONIC */
    AT_CWD = -100,        /* AT_FDCWD */
    READ_CLOEXEC = 02000000,
    BY_SIGNAL = 0, /* SIGEV_SIGNAL */
    SIGINFO_RESTART = 0x10000004,
    CODE_USER = 0, CODE_TKILL = -6, /* si_code of kill and tgkill: the kernel names the sender */
    DEPTH_MAX = 4096
};

struct kernel_siginfo {
    int number, error, code, pad;
    int pid, uid; /* of the sender, where code says that there is one */
};

struct kernel_sigaction {
    void (*handler)(int, struct kernel_siginfo *, void *);
    unsigned long flags;
    void (*restorer)(void);
    unsigned long mask;
};

EXPORT volatile int guard_armed, guard_code, guard_cause;
EXPORT volatile long guard_armed_ns;
EXPORT volatile int guard_sender_known, guard_sender_pid, guard_sender_uid;
EXPORT char guard_sender_comm[16]; /* its name in /proc/PID/stat, empty where it was gone */
EXPORT volatile int guard_refused_pid, guard_refused_signal, guard_refused_total;

static int claimed, timer = -1, lifeline = -1, wake = -1;
static long deadline;

static unsigned long bit(int number) { return 1UL << (number - 1); }

static unsigned long guarded(void)
{
    return bit(HUP) | bit(INT) | bit(QUIT) | bit(TERM) | bit(DEADLINE_SIGNAL);
}

static void wake_loop(void)
{
    const char byte = 'g';
    sys(SYS_WRITE, wake, (long)&byte, 1, 0, 0); /* a full pipe has its wake-up already */
}

/* Read /proc/PID/stat, "PID (NAME) S PARENT ...", into `text`. Returns where its last ')' is, for a
 * process chooses its own name, or -1; *got is how much was read. */
static long read_stat(int pid, char *text, long size, long *got)
{
    char path[32];
    long fd, at = 0;
    int digits = 1;

    for (const char *c = "/proc/"; *c; c++)
        path[at++] = *c;
    for (int rest = pid; rest >= 10; rest /= 10)
        digits++;
    for (int i = digits - 1, rest = pid; i >= 0; i--, rest /= 10)
        path[at + i] = (char)('0' + rest % 10);
    at += digits;
    for (const char *c = "/stat"; *c; c++)
        path[at++] = *c;
    path[at] = 0;
    fd = sys(SYS_OPENAT, AT_CWD, (long)path, READ_CLOEXEC, 0, 0);
    if (fd < 0)
        return -1;
    *got = sys(SYS_READ, fd, (long)text, size, 0, 0);
    sys(SYS_CLOSE, fd, 0, 0, 0, 0);
    for (at = *got - 1; at >= 0 && text[at] != ')'; at--)
        ;
    return at;
}

/* The parent of `pid`, 0 where that is beyond our pid namespace, or -1 if it cannot be read. */
static int parent_of(int pid)
{
    char text[512];
    long got = 0, at = read_stat(pid, text, sizeof text, &got);
    int parent = 0;

    if (at < 0)
        return -1;
    for (at += 4; at < got && text[at] >= '0' && text[at] <= '9'; at++)
        parent = parent * 10 + (text[at] - '0');
    return parent;
}

/* Whoever sent it is likely to be gone once the loop hears of the stop; so its name is read here. */
static void keep_sender(const struct kernel_siginfo *sender)
{
    char text[512];
    long got = 0, from = 0, kept = 0, end;

    guard_sender_pid = sender->pid;
    guard_sender_uid = sender->uid;
    end = sender->pid > 0 ? read_stat(sender->pid, text, sizeof text, &got) : -1;
    while (from < end && text[from] != '(')
        from++;
    while (kept < 15 && ++from < end)
        guard_sender_comm[kept++] = text[from];
    __atomic_store_n(&guard_sender_known, 1, __ATOMIC_SEQ_CST);
}

static int arm(int code, int cause, const struct kernel_siginfo *sender)
{
    const long until[4] = {0, 0, deadline / 1000000000, deadline % 1000000000}; /* itimerspec */

    long now[2] = {0, 0}; /* timespec */

    if (__atomic_exchange_n(&claimed, 1, __ATOMIC_SEQ_CST))
        return 0;
    sys(SYS_CLOCK_GETTIME, MONOTONIC, (long)now, 0, 0, 0);
    guard_armed_ns = now[0] * 1000000000 + now[1];
    guard_code = code;
    guard_cause = cause;
    __atomic_store_n(&guard_armed, 1, __ATOMIC_SEQ_CST);
    sys(SYS_TIMER_SETTIME, timer, 0, (long)until, 0, 0);
    sys(SYS_SHUTDOWN, lifeline, BOTH_WAYS, 0, 0, 0); /* every shim ends its tree from now on */
    if (sender)
        keep_sender(sender); /* nothing that counts waits for it */
    wake_loop();
    return 1;
}

EXPORT int guard_arm(int code, int cause) { return arm(code, cause, 0); }

/* Whether the sender is one of ours: a command's stray or hostile kill is not a request to stop.
 *
 * A sender that is gone already counts as outside. The honest way to stop a daemon is a kill(1)
 * that exits at once, so refusing what cannot be proven would lose real stops, while a command
 * that wants the daemon gone has KILL wherever it may send TERM.
 * Not so where we are PID 1: no signal of a command's can end us there, so this one must not either.
 * A sender from beyond the pid namespace has pid 0 then, and what `docker exec` brought in has
 * parent 0, as long as it lives; all others descend from us, and who cannot be seen is one of them. */
static int descends_from_us(int sender)
{
    const int self = (int)sys(SYS_GETPID, 0, 0, 0, 0, 0);
    int pid = sender;

    if (pid == self)
        return 0;
    for (int depth = 0; pid > 1 && depth < DEPTH_MAX; depth++) {
        pid = parent_of(pid);
        if (pid == self)
            return 1;
    }
    return self == 1 && pid != 0;
}

/* Whether the sender itself wrote what the signal says of it: rt_sigqueueinfo(2), so sigqueue(3),
 * takes any negative code but tgkill's, and with it any pid. Whom that names proves nothing. */
static int is_forgeable(int code) { return code < 0 && code != CODE_TKILL; }

static void on_signal(int number, struct kernel_siginfo *info, void *context)
{
    const int is_named = info->code == CODE_USER || info->code == CODE_TKILL;

    (void)context;
    if (is_forgeable(info->code) || (is_named && descends_from_us(info->pid))) {
        guard_refused_pid = is_named ? info->pid : 0;
        guard_refused_signal = number;
        __atomic_fetch_add(&guard_refused_total, 1, __ATOMIC_SEQ_CST);
        wake_loop();
        return;
    }
    arm(0, number, is_named ? info : 0);
}

static void on_deadline(int number, struct kernel_siginfo *info, void *context)
{
    long now[2] = {0, 0};

    (void)number, (void)info, (void)context;
    /* Anyone who may signal us can send this number, and make it look like the timer's: so the
     * clock decides. */
    sys(SYS_CLOCK_GETTIME, MONOTONIC, (long)now, 0, 0, 0);
    if (guard_armed && now[0] * 1000000000 + now[1] - guard_armed_ns >= deadline)
        sys(SYS_EXIT_GROUP, guard_code, 0, 0, 0, 0);
}

static long handle(int number, void (*handler)(int, struct kernel_siginfo *, void *))
{
    /* Each handler holds the other signals back, so that one is finished before the next. */
    const struct kernel_sigaction action = {
        .handler = handler,
        .flags = SIGINFO_RESTART | SA_RESTORER_FLAG,
        .restorer = guard_restorer,
        .mask = guarded() & ~bit(DEADLINE_SIGNAL),
    };
    return sys(SYS_RT_SIGACTION, number, (long)&action, 0, sizeof action.mask, 0);
}

EXPORT int guard_hold(void)
{
    const int signals[] = {TERM, INT, QUIT, HUP};
    struct kernel_sigaction inherited;
    long failed = 0;

    for (int i = 0; i < 4 && !failed; i++) {
        failed = sys(SYS_RT_SIGACTION, signals[i], 0, (long)&inherited, sizeof inherited.mask, 0);
        /* nohup(1) asked for HUP to be ignored. */
        if (!failed && !(signals[i] == HUP && (long)inherited.handler == 1))
            failed = handle(signals[i], on_signal);
    }
    return (int)failed;
}

EXPORT int guard_setup(int lifeline_fd, int wake_fd, long deadline_ns)
{
    struct { /* sigevent */
        long value;
        int number, notify, pad[12];
    } event;
    long failed;

    for (int i = 0; i < 12; i++)
        event.pad[i] = 0;
    event.value = 0;
    event.number = DEADLINE_SIGNAL;
    event.notify = BY_SIGNAL;
    lifeline = lifeline_fd;
    wake = wake_fd;
    deadline = deadline_ns;
    failed = sys(SYS_TIMER_CREATE, MONOTONIC, (long)&event, (long)&timer, 0, 0);
    if (!failed)
        failed = handle(DEADLINE_SIGNAL, on_deadline);
    if (!failed)
        failed = guard_hold();
    return (int)failed;
}

EXPORT void guard_park(void)
{
    const unsigned long all_others = ~guarded();

    sys(SYS_RT_SIGPROCMASK, SET_MASK, (long)&all_others, 0, sizeof all_others, 0);
    for (;;)
        sys(SYS_PPOLL, 0, 0, 0, 0, 0);
}
