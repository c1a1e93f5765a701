/* spool_io.so: writes a batch of records to the spool's file, and sums them, in one call.
 *
 * WHY NATIVE. The thread that writes needs the GIL again after each call that gave it up, and the
 * loop has it back within microseconds: with one call for each checksum a command that writes
 * 1 GB/s outruns the thread, on an idle disk (DECISIONS.md has the figures). So the whole batch
 * is one call, without the GIL from its beginning to its end. Where this library cannot be loaded
 * daemon/spool_io.py does the same in Python.
 *
 * USE, from Python through ctypes; any thread.
 *   spool_setup()               once, before the others; returns LAYOUT, which changes with what the
 *                               calls below take: a build that is older or newer is not called.
 *   spool_crc(crc, data, size)  the CRC-32C of what `crc` is the sum of (0: nothing) and data.
 *   spool_write(fd, pieces, piece_count, extents, parts, sizes)
 *                               writes the parts, one after the other, into the extents in order.
 *                               The pieces say how many of the parts are theirs, and each one's
 *                               crc goes on over them. No part is empty; the parts are as long
 *                               together as the extents, and belong to pieces all of them.
 *                               0, or -errno: then nothing counts. A short write goes on, and a
 *                               signal's EINTR; what is written of nothing is EIO.
 *
 * No libc and no Python API, as guard.so.
 */
#include "guard_sys.h"

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
enum { SYS_PWRITEV = 296 };
#else
enum { SYS_PWRITEV = 70 };
#endif
enum { LAYOUT = 2 };
enum { GROUP = 256 /* parts of one pwritev(2) */, OUR_EINTR = 4, OUR_EIO = 5 };
static const unsigned POLYNOMIAL = 0x82f63b78; /* CRC-32C, reflected */

struct part { const unsigned char *data; unsigned long size; };
struct piece { unsigned long parts, crc; };
struct extent { long at; unsigned long size; };
struct source {
    const unsigned char *const *parts;
    const unsigned long *sizes;
    unsigned long skip; /* bytes of the first part */
};

static unsigned table[8][256];
static int has_instruction;

EXPORT int spool_setup(void)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        unsigned crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[0][byte] = crc;
    }
    for (int at = 1; at < 8; at++)
        for (unsigned byte = 0; byte < 256; byte++)
            table[at][byte] = table[at - 1][byte] >> 8 ^ table[0][table[at - 1][byte] & 255];
#if defined(__x86_64__)
    unsigned eax = 1, ebx, ecx = 0, edx;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    has_instruction = ecx >> 20 & 1; /* SSE4.2 */
#endif
    return LAYOUT;
}

/* Eight bytes at a time, Kounavis and Berry, 2005. */
static unsigned by_table(unsigned crc, const unsigned char *data, unsigned long size)
{
    for (; size >= 8; size -= 8, data += 8) {
        crc ^= (unsigned)data[0] | (unsigned)data[1] << 8 | (unsigned)data[2] << 16
               | (unsigned)data[3] << 24;
        crc = table[7][crc & 255] ^ table[6][crc >> 8 & 255] ^ table[5][crc >> 16 & 255]
              ^ table[4][crc >> 24] ^ table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]]
              ^ table[0][data[7]];
    }
    for (; size; size--, data++)
        crc = crc >> 8 ^ table[0][(crc ^ *data) & 255];
    return crc;
}

#if defined(__x86_64__)
typedef unsigned long long word __attribute__((aligned(1), may_alias));

__attribute__((target("sse4.2"))) static unsigned by_instruction(
    unsigned crc, const unsigned char *data, unsigned long size)
{
    unsigned long long wide = crc;
    for (; size >= 8; size -= 8, data += 8)
        wide = __builtin_ia32_crc32di(wide, *(const word *)data);
    crc = (unsigned)wide;
    for (; size; size--, data++)
        crc = __builtin_ia32_crc32qi(crc, *data);
    return crc;
}
#else
static unsigned by_instruction(unsigned crc, const unsigned char *data, unsigned long size)
{
    return by_table(crc, data, size);
}
#endif

EXPORT unsigned spool_crc(unsigned crc, const void *data, unsigned long size)
{
    return ~(has_instruction ? by_instruction : by_table)(~crc, data, size);
}

static void advance(struct source *from, unsigned long done)
{
    from->skip += done;
    while (from->skip && from->skip >= *from->sizes) {
        from->skip -= *from->sizes++;
        from->parts++;
    }
}

/* Short writes go on, so that the call itself says why it stops. */
static long write_run(int fd, struct extent to, struct source *from)
{
    while (to.size) {
        struct part group[GROUP];
        unsigned long to_come = to.size, skip = from->skip;
        long count = 0;
        for (; count < GROUP && to_come; count++, skip = 0) {
            unsigned long size = from->sizes[count] - skip;
            if (size > to_come)
                size = to_come;
            group[count] = (struct part){from->parts[count] + skip, size};
            to_come -= size;
        }
        long done = sys(SYS_PWRITEV, fd, (long)group, count, to.at, 0);
        if (done == -OUR_EINTR)
            continue;
        if (done <= 0)
            return done ? done : -OUR_EIO;
        to.at += done;
        to.size -= (unsigned long)done;
        advance(from, (unsigned long)done);
    }
    return 0;
}

/* Piece by piece, so that what was summed is written while the processor's cache has it. */
EXPORT long spool_write(
    int fd, struct piece *pieces, unsigned long piece_count, const struct extent *extents,
    const unsigned char *const *parts, const unsigned long *sizes)
{
    struct source from = {parts, sizes, 0};
    struct extent to = {0, 0};
    for (struct piece *piece = pieces; piece < pieces + piece_count; piece++) {
        unsigned long left = 0;
        for (unsigned long part = 0; part < piece->parts; part++, parts++, sizes++) {
            piece->crc = spool_crc((unsigned)piece->crc, *parts, *sizes);
            left += *sizes;
        }
        while (left) {
            if (!to.size)
                to = *extents++;
            struct extent run = {to.at, left < to.size ? left : to.size};
            long failed = write_run(fd, run, &from);
            if (failed)
                return failed;
            to.at += (long)run.size;
            to.size -= run.size;
            left -= run.size;
        }
    }
    return 0;
}
