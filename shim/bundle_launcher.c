/* runnerd and runnerctl of the bundle (image/): start the private Python, whatever the image is.
 *
 * A static program, so that nothing of the image acts before it: no loader, no LD_PRELOAD. It
 * becomes the bundle's own loader, which runs the bundle's own Python on the bundle's own libc:
 *
 *     ROOT/libexec/runnerd --library-path ROOT/lib ROOT/libexec/interpreter -I -S ... ARGUMENTS
 *
 * ROOT is where this file lies, so the tree works in any place. No word of that command line says
 * "python", for an agent's `pkill -f python` comes also before the daemon has set its title.
 *
 * What the image's environment says to loaders, libcs and OpenSSL is meant for the image's
 * programs. It is put aside under RUNNERD_IMAGE_*; entry.py puts it back for the commands, where
 * the private libc does not see it. Python itself looks at no variable (-I).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

enum { DAEMON_FAILED = 78, CLIENT_FAILED = 125 }; /* as runnerd and runnerctl say it themselves */

#define ASIDE "RUNNERD_IMAGE_"

/* A name, or the beginning of one where it ends in "_". */
static const char *const put_aside[] = {
    "LD_", "GLIBC_TUNABLES", "MALLOC_", "GCONV_PATH", "LOCPATH", "NLSPATH",
    "LC_", "LANG", "LANGUAGE", "OPENSSL_",
};

/* Python then takes UTF-8 for everything and neither reads the image's locales nor sets LC_CTYPE;
 * OpenSSL, which is there for SHA-256 alone, reads no configuration. entry.py knows these two. */
static char *const ours[] = {"LC_ALL=C", "OPENSSL_CONF=/dev/null"};

#define LENGTH(array) (sizeof(array) / sizeof *(array))

static const char *program = "runnerd";

static void fail(const char *what, const char *object)
{
    fprintf(stderr, "%s: %s %s: %s\n", program, what, object, strerror(errno));
    exit(strcmp(program, "runnerctl") == 0 ? CLIENT_FAILED : DAEMON_FAILED);
}

static char *joined(const char *first, const char *second)
{
    size_t length = strlen(first);
    char *whole = malloc(length + strlen(second) + 1);
    if (whole == NULL)
        fail("cannot start", second);
    strcpy(whole, first);
    strcpy(whole + length, second);
    return whole;
}

/* Where the bundle lies: two levels above this file. /proc says which file that is, through links. */
static char *bundle_root(void)
{
    static char path[PATH_MAX];
    if (realpath("/proc/self/exe", path) == NULL) {
        const char *executed = (const char *)getauxval(AT_EXECFN);
        if (executed == NULL || realpath(executed, path) == NULL)
            fail("cannot find", "the bundle (is /proc mounted?)");
    }
    for (int level = 0; level < 2; level++) {
        char *slash = strrchr(path, '/');
        if (slash != NULL)
            *slash = '\0';
    }
    return path;
}

static int is_put_aside(const char *variable)
{
    size_t name = strcspn(variable, "=");
    for (size_t i = 0; i < LENGTH(put_aside); i++) {
        size_t length = strlen(put_aside[i]);
        int is_prefix = put_aside[i][length - 1] == '_';
        if (strncmp(variable, put_aside[i], length) == 0 && (is_prefix || name == length))
            return 1;
    }
    return 0;
}

static char **private_environment(void)
{
    size_t count = 0;
    while (environ[count] != NULL)
        count++;
    char **result = calloc(count + LENGTH(ours) + 1, sizeof *result);
    if (result == NULL)
        fail("cannot start", program);
    for (size_t i = 0; i < count; i++)
        result[i] = is_put_aside(environ[i]) ? joined(ASIDE, environ[i]) : environ[i];
    memcpy(result + count, ours, sizeof ours);
    return result;
}

int main(int argc, char **argv)
{
    if (argc > 0) {
        const char *slash = strrchr(argv[0], '/');
        if (strcmp(slash == NULL ? argv[0] : slash + 1, "runnerctl") == 0)
            program = "runnerctl";
    }
    char *root = bundle_root();
    if (strpbrk(root, ":;$") != NULL) { /* all of them mean something to a loader */
        errno = EINVAL;
        fail("cannot run in a folder of this name:", root);
    }
    char *loader = joined(root, "/libexec/runnerd");
    char *const front[] = {
        loader, "--library-path", joined(root, "/lib"), joined(root, "/libexec/interpreter"),
        "-I", "-S", "-X", "utf8", "-c",
        strcmp(program, "runnerctl") == 0 ? "import entry; entry.runnerctl()"
                                          : "import entry; entry.runnerd()",
    };
    char **words = calloc(LENGTH(front) + (size_t)argc + 1, sizeof *words);
    if (words == NULL)
        fail("cannot start", loader);
    memcpy(words, front, sizeof front);
    if (argc > 1)
        memcpy(words + LENGTH(front), argv + 1, (size_t)(argc - 1) * sizeof *words);
    execve(loader, words, private_environment());
    fail("cannot start", loader);
}
