/* spool_io.c on a disk of its own making, which is short, interrupted, full or stuck: the
 * sanitizers watch, and every byte and checksum is held against what it should be. */
#include "../../shim/guard_sys.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long disk(long number, long fd, long parts, long count, long at, long zero);
#define sys disk
#include "../../shim/spool_io.c"
#undef sys

enum { DISK = 1 << 20, PARTS = 600 };
static unsigned char stored[DISK], wanted[DISK];
static unsigned long most;     /* of one write */
static long calls, fails_with; /* from the fourth call on */
static int is_interrupted;

static long disk(long number, long fd, long parts, long count, long at, long zero)
{
    assert(number == SYS_PWRITEV && fd == 7 && count >= 1 && count <= GROUP && !zero);
    if (++calls > 3 && fails_with <= 0)
        return fails_with;
    if (is_interrupted && calls % 2)
        return -OUR_EINTR;
    unsigned long done = 0;
    for (struct part *part = (struct part *)parts; count-- && done < most; part++) {
        unsigned long size = part->size < most - done ? part->size : most - done;
        memcpy(stored + at + done, part->data, size);
        done += size;
    }
    return (long)done;
}

static unsigned slow_crc(unsigned crc, const unsigned char *data, unsigned long size)
{
    for (crc = ~crc; size--; data++) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
    }
    return ~crc;
}

/* Parts of odd sizes, each in memory of exactly its size, in pieces and extents that cross. */
static void batch(unsigned seed, unsigned long most_, int is_interrupted_, long fails_with_)
{
    static unsigned char *parts[PARTS];
    static unsigned long sizes[PARTS];
    struct piece pieces[3] = {{100, 0}, {1, 0x12345678}, {PARTS - 101, 0}};
    unsigned crcs[3] = {0, 0x12345678, 0};
    struct extent extents[3];
    unsigned long total = 0;
    srand(seed);
    for (int at = 0; at < PARTS; at++) {
        sizes[at] = 1 + (unsigned long)rand() % 700;
        parts[at] = malloc(sizes[at]);
        for (unsigned long byte = 0; byte < sizes[at]; byte++)
            parts[at][byte] = (unsigned char)rand();
        unsigned *crc = &crcs[at < 100 ? 0 : at < 101 ? 1 : 2];
        *crc = slow_crc(*crc, parts[at], sizes[at]);
        total += sizes[at];
    }
    unsigned long first = total / 3 + 1, second = total / 5 + 3;
    extents[0] = (struct extent){500000, first};
    extents[1] = (struct extent){100, second};
    extents[2] = (struct extent){800000, total - first - second};
    memset(stored, 0, DISK);
    memset(wanted, 0, DISK);
    unsigned long extent = 0, within = 0;
    for (int at = 0; at < PARTS; at++)
        for (unsigned long byte = 0; byte < sizes[at]; byte++) {
            if (within == extents[extent].size)
                extent++, within = 0;
            wanted[(unsigned long)extents[extent].at + within++] = parts[at][byte];
        }
    calls = 0;
    most = most_;
    is_interrupted = is_interrupted_;
    fails_with = fails_with_;
    long result = spool_write(7, pieces, 3, extents, (const unsigned char *const *)parts, sizes);
    if (fails_with <= 0) {
        assert(result == (fails_with ? fails_with : -OUR_EIO));
        assert(calls == 4); /* it does not go on */
    } else {
        assert(!result);
        assert(!memcmp(stored, wanted, DISK));
        for (int at = 0; at < 3; at++)
            assert(pieces[at].crc == crcs[at]);
    }
    for (int at = 0; at < PARTS; at++)
        free(parts[at]);
}

int main(void)
{
    spool_setup();
    for (int by_instruction = has_instruction; by_instruction >= 0; by_instruction--) {
        has_instruction = by_instruction;
        assert(spool_crc(0, "123456789", 9) == 0xe3069283);
        for (unsigned seed = 1; seed < 20; seed++) {
            batch(seed, DISK, 0, 1);
            batch(seed, DISK, 1, 1);
            batch(seed, 1 + seed * 97, 0, 1);
            batch(seed, 1 + seed, 1, 1);
            batch(seed, 1000, 0, -28);
            batch(seed, 1000, 0, 0);
        }
    }
    puts("all as it should be");
    return 0;
}
