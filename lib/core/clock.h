/* Monotonic time in seconds, the one clock that every duration and trace event uses. */
#ifndef TAGC_CORE_CLOCK_H
#define TAGC_CORE_CLOCK_H
double tagc_clock_s(void);
#endif
