/* Numbers for people. */
#include "launch/human.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const char *tagc_human(double value, char *text) {
    static const char *const units[] = {"", " k", " M", " G", " T"};
    int unit = 0;
    for (; fabs(value) >= 999.5 && unit < 4; unit++) value /= 1000;
    int digits = value >= 99.95 || (unit == 0 && value == floor(value)) ? 0 : value >= 9.995 ? 1 : 2;
    snprintf(text, 16, "%.*f%s", digits, value, units[unit]);
    return text;
}

const char *tagc_human_bytes(double value, char *text) {
    size_t n = strlen(tagc_human(value, text));
    snprintf(text + n, 16 - n, "%s", strchr(text, ' ') ? "B" : " B");
    return text;
}

const char *tagc_human_rate(double bytes_per_s, char *text) {
    double bits = 8 * bytes_per_s;
    if (bits >= 999.5e6)
        snprintf(text, 24, "%.2f Gbit/s", 1e-9 * bits);
    else
        snprintf(text, 24, "%.1f Mbit/s", 1e-6 * bits);
    return text;
}

const char *tagc_human_time(double seconds, char *text) {
    if (seconds >= 0.9995)
        snprintf(text, 24, "%.3f s", seconds);
    else if (seconds >= 0.9995e-3)
        snprintf(text, 24, "%.1f ms", 1e3 * seconds);
    else
        snprintf(text, 24, "%.1f us", 1e6 * seconds);
    return text;
}
