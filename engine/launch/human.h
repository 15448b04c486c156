/* Numbers for people, of three digits. Each writes into `text` and returns it. */
#ifndef TAGC_LAUNCH_HUMAN_H
#define TAGC_LAUNCH_HUMAN_H

/* "1.23 k", "4.56 M". text: at least 16 bytes. */
const char *tagc_human(double value, char *text);
const char *tagc_human_bytes(double value, char *text); /* "1.23 kB" */
/* "1.94 Gbit/s", "61.2 us". text: at least 24 bytes. */
const char *tagc_human_rate(double bytes_per_s, char *text);
const char *tagc_human_time(double seconds, char *text);

#endif
