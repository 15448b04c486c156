/* How often a test repeats: as released, under the address sanitizer and under qemu, under the thread sanitizer. The last two are
 * slower by a factor of 2 to 15, and what they find lies in paths of the code and in threads that meet, not in more numbers. */
#ifndef TAGC_TESTS_REPEATS_H
#define TAGC_TESTS_REPEATS_H

#if defined(__SANITIZE_THREAD__)
#define REPEATS(released, address, thread) (thread)
#elif defined(TAGC_SANITIZED)
#define REPEATS(released, address, thread) (address)
#else
#define REPEATS(released, address, thread) (released)
#endif

/* Leaves a test out under the thread sanitizer. It is the first line of a test of one thread, in which that finds nothing. */
#define HAS_ONE_THREAD()                                                                                     \
    do {                                                                                                     \
        if (REPEATS(0, 0, 1)) skip();                                                                        \
    } while (0)

#endif
