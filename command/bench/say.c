/* Printing, and adding to the result, for all parts of tagc bench. */
#include "bench/bench.h"

#include <stdarg.h>

void tagc_bench_say(const tagc_bench *bench, const char *format, ...) {
    if (bench->rank->rank != 0 || bench->plan->options.train.quiet) return;
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    fflush(stdout);
}

void tagc_bench_put(tagc_bench *bench, const char *name, json_t *value) {
    if (bench->result)
        json_object_set_new(bench->result, name, value);
    else
        json_decref(value);
}
