/* System calls without a libc, for guard.c: the numbers and one way in, x86-64 and arm64. */
#ifndef GUARD_SYS_H
#define GUARD_SYS_H

#if defined(__x86_64__)
enum {
    SYS_READ = 0, SYS_WRITE = 1, SYS_CLOSE = 3, SYS_RT_SIGACTION = 13, SYS_RT_SIGPROCMASK = 14,
    SYS_GETPID = 39, SYS_SHUTDOWN = 48, SYS_TIMER_CREATE = 222, SYS_TIMER_SETTIME = 223,
    SYS_CLOCK_GETTIME = 228, SYS_EXIT_GROUP = 231, SYS_OPENAT = 257, SYS_PPOLL = 271
};

static long sys(long number, long a, long b, long c, long d, long e)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

/* The x86-64 kernel returns from a handler only through code we supply (SA_RESTORER). */
enum { SA_RESTORER_FLAG = 0x04000000 };
void guard_restorer(void);
__asm__(".text\n.hidden guard_restorer\n.globl guard_restorer\n.type guard_restorer,@function\n"
        "guard_restorer:\n\tmov $15, %eax\n\tsyscall\n");

#elif defined(__aarch64__)
enum {
    SYS_OPENAT = 56, SYS_CLOSE = 57, SYS_READ = 63, SYS_WRITE = 64, SYS_PPOLL = 73,
    SYS_EXIT_GROUP = 94, SYS_TIMER_CREATE = 107, SYS_TIMER_SETTIME = 110, SYS_CLOCK_GETTIME = 113,
    SYS_RT_SIGACTION = 134, SYS_RT_SIGPROCMASK = 135, SYS_GETPID = 172, SYS_SHUTDOWN = 210
};

static long sys(long number, long a, long b, long c, long d, long e)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    __asm__ volatile("svc #0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
                     : "memory", "cc");
    return x0;
}

/* Here the kernel returns through its own vdso. */
enum { SA_RESTORER_FLAG = 0 };
#define guard_restorer ((void (*)(void))0)

#else
#error "guard.c knows the system calls of x86-64 and arm64 only"
#endif

#endif
