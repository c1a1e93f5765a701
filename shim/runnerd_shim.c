/* runnerd-shim: stands between runnerd and one command.
 *
 * INTERFACE
 *   No arguments, an empty environment, two descriptors or three:
 *     3  control   one end of a SOCK_SEQPACKET pair; one text line per message, both ways
 *     4  lifeline  one end of a SOCK_STREAM pair shared by all shims; only its end means anything
 *     5  leaf      a cgroup v2 for the command, or nothing that is one
 *   It forks the process that will become the command at once, says `parked`, and waits.
 *
 *   From runnerd: `job` (with descriptors: stdin, stdout, stderr, the job's memfd),
 *   `signal N command|group|tree`, `end GRACE_MS`.
 *   To runnerd: parked, failed, leaf, oom-adj, started, exited, signalled, ending, termed, killing,
 *   killed, survivors, empty. README.md lists their words; runnerd/protocol/shimwire.py parses
 *   them, and runnerd/protocol/job.py writes the memfd. Those two and these sources change
 *   together. shim_child.h is the child's half, shim_tree.h finds and signals processes.
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
#include <poll.h>
#include <sched.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include "shim_child.h"
#include "shim_tools.h"
#include "shim_tree.h"

#ifndef SYS_close_range
#define SYS_close_range 436 /* on every architecture; older headers lack it */
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif

enum {
    CONTROL_FD = 3,
    LIFELINE_FD = 4,
    LEAF_FD = 5,
    FIRST_OTHER_FD = 6,
    CGROUP2_MAGIC = 0x63677270,

    HANG_UP_GRACE_MS = 1500, /* runnerd's own stop kills at 1.5 s and is gone at 2.0 s */
    KILL_BOUND_MS = 1000,    /* rounds of KILL until what is left is called a survivor */
    KILL_HOLD_MS = 100,      /* without news, until the dead are reaped though others are dying */
    KILL_ROUND_MS = 2,       /* between rounds, unless a child's end wakes us sooner */
    SURVIVOR_ROUND_MS = 1000,
    SEND_WAIT_MS = 100,  /* the first time the control socket is full; after that, no wait */
    EXIT_RETRY_MS = 20,
    TERM_RETRY_MS = 1,
    LEAVE_WAIT_MS = 1000, /* then the unreaped leader is left to runnerd */

    KILLED_SLOTS = 65536,
    LISTED_MAX = 200 /* entries in a receipt; its total counts all */
};

/* ----------------------------------------------------------------------------- the shim's state */

enum phase { WAITING, STARTING, STARTED, FAILED };
enum ladder { AT_REST, GRACE, KILLING, SURVIVING };

static int job_socket = -1; /* -1 once its end was seen */
static int leaf_kill = -1;  /* the cgroup.kill of the command's leaf, where it has one */
static enum phase phase = WAITING;
static bool leader_reaped, exit_unsent;
static int64_t exit_unsent_ms;
static enum ladder ladder = AT_REST;
static bool term_owed;
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

/* ----------------------------------------------------------------------------------- the ladder */

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
 * True if some are not dead yet, or if the kernel does not list them. */
static bool kill_children(void)
{
    bool dying;

    tree_count = 0;
    dying = !each_child(self, self, kill_child_now);
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

/* Everything in the leaf at once, and what is being forked there. */
static void kill_leaf(void)
{
    while (leaf_kill >= 0 && write(leaf_kill, "1", 1) < 0 && errno == EINTR)
        ;
}

/* For the receipt: who lives now, for of a leaf that is killed at once only the dead are met. */
static void note_living(void)
{
    if (leaf_kill < 0)
        return;
    tree_list();
    for (size_t i = 0; i < tree_count; i++)
        if (tree[i].state != 'Z')
            note_killed(&tree[i]);
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
    bool dying;

    kill_leaf();
    dying = kill_children();

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

/* The libcs leave out the fifth argument, the usage of a child that is not reaped yet. */
static int peek(idtype_t whom, pid_t pid, siginfo_t *info, struct rusage *usage)
{
    info->si_pid = 0;
    return (int)syscall(SYS_waitid, whom, pid, info, WEXITED | WNOHANG | WNOWAIT, usage);
}

/* A dead child that a process of somebody else's traces: it is hidden from us until that one lets
 * go of it, its status too. */
static bool is_withheld(const struct process *process)
{
    siginfo_t info;

    return process->state == 'Z' && process->parent == self &&
           peek(P_PID, process->pid, &info, NULL) == 0 && info.si_pid == 0;
}

static void say_survivors(void)
{
    static struct line said;
    struct line line = {.used = 0}, list = {.used = 0};
    int64_t total = 0;

    tree_list();
    for (size_t i = 0; i < tree_count; i++) {
        int error = signal_process(&tree[i], SIGKILL, 0);

        if ((error == ESRCH && !is_withheld(&tree[i])) || ++total > LISTED_MAX)
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

/* A parked child ignores TERM, and so does one that has just been handed a job: sent then, it would
 * be lost, and only KILL would end the command. */
static void term_if_owed(void)
{
    if (!term_owed || (phase == STARTING && !report->hears_term))
        return;
    term_owed = false;
    term_round();
}

static void reap(void);

static void end_tree(int64_t grace_ms)
{
    struct line line = {.used = 0};
    int64_t now = grace_ms > 0 ? now_ms_up() : now_ms();
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
    term_owed |= first && grace_ms > 0;
    term_if_owed();
}

static void climb_ladder(void)
{
    int64_t now = now_ms();

    if (ladder == GRACE && now >= kill_at_ms) {
        struct line line = {.used = 0};

        put(&line, "killing"); /* before the first KILL, so that an exit by it is known as ours */
        say(&line);
        note_living();
        ladder = KILLING;
        term_owed = false;
        survivors_at_ms = now_ms_up() + KILL_BOUND_MS;
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

/* ------------------------------------------------------------------------ the leader's two ends */

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
    if (report->leaf_errno) {
        put(&line, "leaf");
        put_word_number(&line, report->leaf_errno);
        say(&line);
        line.used = 0;
    }
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
    put_word_number(&line, report->execve_ns);
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
    if (phase == STARTED) {
        if (!say_exited(info, usage))
            return false;
        /* runnerd was woken on this processor and would wait for our tidying up: 0.1 ms of an
         * exit's way to its client. */
        sched_yield();
    }
    if (phase == WAITING || phase == STARTING) {
        say_failed("killed", info->si_status, false);
        phase = FAILED;
    }
    while (waitpid(leader, NULL, 0) < 0 && errno == EINTR)
        ;
    leader_reaped = true;
    return true;
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
        if (peek(hold_until_ms ? P_PID : P_ALL, leader, &info, &usage) < 0) {
            if (errno == EINTR)
                continue;
            if (errno == ECHILD && !hold_until_ms)
                leave(); /* nothing is left, for every orphan comes to a subreaper */
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

/* 0 if the child has it. That it is dead (one of three errnos, by how far its death has come) is no
 * failure here: reap() tells by what. */
static int hand_on(int *fds, int fd_count)
{
    if (fd_count != JOB_FDS)
        return fd_count < 0 ? EMFILE : EINVAL;
    kill(leader, SIGCONT); /* a command of our user may have stopped it */
    if (pass_on(job_socket, fds, fd_count) || errno == EPIPE || errno == ECONNRESET ||
        errno == ECONNREFUSED)
        return 0;
    return errno; /* no memory, or too many descriptors of this user are in sockets already */
}

static void take_job(int *fds, int fd_count)
{
    int error;

    if (phase != WAITING)
        return;
    error = hand_on(fds, fd_count);
    if (error) {
        say_failed("job", error, false);
        phase = FAILED;
        kill(leader, SIGKILL);
    } else
        phase = STARTING;
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
    int fds[JOB_FDS], fd_count;
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

/* Descriptor 5, if it is a cgroup v2; anything else there is not for us. */
static bool has_leaf(void)
{
    struct statfs files;

    if (fstatfs(LEAF_FD, &files) == 0 && (uint32_t)files.f_type == CGROUP2_MAGIC)
        return true;
    close(LEAF_FD);
    return false;
}

/* The child is made in its leaf. To move one there can take the kernel 15 ms, so that is done only
 * where it cannot be made there: before 5.7, and under filters that refuse clone3(). A refusal of
 * both is told, not an error. */
static pid_t fork_into_leaf(void)
{
    /* CLONE_ARGS_SIZE_VER2: flags, six that fork() leaves 0 but exit_signal, set_tid's two, cgroup */
    const uint64_t into_cgroup = 1ULL << 33;
    uint64_t arguments[11] = {into_cgroup, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, LEAF_FD};
    long pid = syscall(SYS_clone3, arguments, sizeof arguments);
    int procs;

    if (pid >= 0 || errno == EAGAIN)
        return (pid_t)pid;
    pid = fork();
    if (pid == 0) {
        procs = openat(LEAF_FD, "cgroup.procs", O_WRONLY | O_CLOEXEC);
        if (procs < 0 || write(procs, "0", 1) < 0)
            report->leaf_errno = errno;
        close(procs);
    }
    return (pid_t)pid;
}

static void fork_child(void)
{
    bool leaf = has_leaf();
    int pair[2];

    report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (report == MAP_FAILED || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        give_up("setup");
    leader = leaf ? fork_into_leaf() : fork();
    if (leader < 0)
        give_up("fork");
    if (leaf) {
        if (leader > 0)
            leaf_kill = openat(LEAF_FD, "cgroup.kill", O_WRONLY | O_CLOEXEC);
        close(LEAF_FD);
    }
    if (leader == 0) {
        close(CONTROL_FD);
        close(LIFELINE_FD);
        close(pair[0]);
        child_main(pair[1], self);
    }
    close(pair[1]);
    job_socket = pair[0];
}

static int wait_ms(void)
{
    int64_t until, now = now_ms();

    if (ladder == AT_REST)
        until = exit_unsent ? now + EXIT_RETRY_MS : -1;
    else
        until = ladder == GRACE ? kill_at_ms : round_at_ms;
    if (until < 0)
        return -1;
    if (exit_unsent && until > now + EXIT_RETRY_MS)
        until = now + EXIT_RETRY_MS;
    if (term_owed && until > now + TERM_RETRY_MS)
        until = now + TERM_RETRY_MS;
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
        term_if_owed();
        climb_ladder();
        reap(); /* a round of KILL may just have seen the last one dead */
        ms = wait_ms();
        timeout.tv_sec = ms / 1000;
        timeout.tv_nsec = (long)(ms % 1000) * 1000000;
        fds[0].fd = control_open ? CONTROL_FD : -1;
        fds[2].fd = phase == STARTING ? job_socket : -1;
        /* Here alone SIGCHLD can come: a child's end ends the wait, and none slips in before it. */
        if (ppoll(fds, 3, ms < 0 ? NULL : &timeout, while_waiting) <= 0)
            continue;
        if (fds[2].revents)
            start_ended();
        if (fds[0].revents)
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
    prctl(PR_SET_PDEATHSIG, SIGCONT, 0, 0, 0); /* stopped, it would not see the lifeline end */
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* refused: what leaves the tree goes to runnerd */
    prctl(PR_SET_NAME, "runnerd-shim", 0, 0, 0);
    self = getpid();
    fork_child();
    put(&line, "parked");
    put_word_number(&line, leader);
    say(&line);
    run(&while_waiting);
}
