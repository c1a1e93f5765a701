/* spool_io.so: writes a batch of records to the spool's file, and sums them, in one call.
 *
 * WHY NATIVE. The thread that writes needs the GIL again after each call that gave it up, and the
 * loop has it back within microseconds: with one call for each block and one for each checksum, a
 * command that writes 1 GB/s outran the thread after 40 ms, on an idle disk (DECISIONS.md has the
 * figures). So the whole batch is one call, without the GIL from its beginning to its end.
 *
 * USE, from Python through ctypes; any thread.
 *   spool_setup()                  once, before the others.
 *   spool_crc(crc, data, size)     the CRC-32C of what `crc` is the sum of (0: nothing) and data.
 *   spool_write(fd, count, pieces, parts, sizes)
 *                                  writes `count` pieces, each from its own offset; the parts of
 *                                  all of them follow one another in `parts`. Each piece's crc
 *                                  goes on over its bytes. 0, or -errno: then nothing counts.
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
enum { GROUP = 256, OUR_EINTR = 4, OUR_EIO = 5 };
static const unsigned POLYNOMIAL = 0x82f63b78; /* CRC-32C, reflected */

struct part { const unsigned char *data; unsigned long size; };
struct piece { long at; long parts; unsigned long crc; };

static unsigned table[8][256];
static int has_instruction;

EXPORT void spool_setup(void)
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

/* Write at most GROUP parts; short writes go on, so that the call itself says why it stops. */
static long write_group(int fd, struct part *parts, long count, long at)
{
    while (count) {
        long done = sys(SYS_PWRITEV, fd, (long)parts, count, at, 0);
        if (done == -OUR_EINTR)
            continue;
        if (done <= 0)
            return done ? done : -OUR_EIO;
        at += done;
        while (count && (unsigned long)done >= parts->size) {
            done -= (long)parts->size;
            parts++;
            count--;
        }
        if (count) {
            parts->data += done;
            parts->size -= (unsigned long)done;
        }
    }
    return 0;
}

EXPORT long spool_write(
    int fd, long count, struct piece *pieces, const unsigned char *const *parts,
    const unsigned long *sizes)
{
    for (struct piece *piece = pieces; piece < pieces + count; piece++) {
        long at = piece->at;
        while (piece->parts) {
            struct part group[GROUP];
            long size = 0, taken = piece->parts < GROUP ? piece->parts : GROUP;
            for (long part = 0; part < taken; part++) {
                group[part] = (struct part){parts[part], sizes[part]};
                piece->crc = spool_crc((unsigned)piece->crc, parts[part], sizes[part]);
                size += (long)sizes[part];
            }
            long failed = write_group(fd, group, taken, at);
            if (failed)
                return failed;
            at += size;
            parts += taken;
            sizes += taken;
            piece->parts -= taken;
        }
    }
    return 0;
}
