/* Numbers with a unit, as values of options: 10gbit, 50us, 7b. */
#ifndef TAGC_OPTIONS_QUANTITY_H
#define TAGC_OPTIONS_QUANTITY_H

#include <stddef.h>

/* The first n characters of text. A rate has kbit, mbit, gbit or tbit and is 1 to 1e15 bit/s; a time has us, ms or s and is
 * 0 to 1e15 s; a size has k, m, b, g, t or nothing, in any case, and is above 0 to 1e15. 0 if text is something else. */
int tagc_quantity_rate(const char *text, size_t n, double *bits_per_s);
int tagc_quantity_time(const char *text, size_t n, double *seconds);
int tagc_quantity_size(const char *text, size_t n, double *size);

#endif
