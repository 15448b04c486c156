/* What the parts of tagc bench share: printing, the result, figures over all ranks. */
#include "bench/bench.h"

#include "core/status.h"
#include <stdarg.h>
#include <stdlib.h>

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

const char *tagc_bench_rate(double bytes_per_s, char *text) {
    double bits = 8 * bytes_per_s;
    if (bits >= 999.5e6)
        snprintf(text, 24, "%.2f Gbit/s", 1e-9 * bits);
    else
        snprintf(text, 24, "%.1f Mbit/s", 1e-6 * bits);
    return text;
}

const char *tagc_bench_time(double seconds, char *text) {
    if (seconds >= 0.9995)
        snprintf(text, 24, "%.3f s", seconds);
    else if (seconds >= 0.9995e-3)
        snprintf(text, 24, "%.1f ms", 1e3 * seconds);
    else
        snprintf(text, 24, "%.1f us", 1e6 * seconds);
    return text;
}

static tagc_status over_ranks(tagc_comm *comm, double *values, int n, int mean) {
    int world_size = tagc_comm_world_size(comm);
    size_t n_bytes = (size_t)n * sizeof *values;
    double *all = calloc((size_t)world_size, n_bytes);
    if (!all) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for figures of %d ranks", world_size);
    tagc_status status = tagc_comm_all_gather(comm, values, n_bytes, all);
    for (int i = 0; status == TAGC_OK && i < n; i++) {
        double most = all[i], sum = 0;
        for (int rank = 0; rank < world_size; rank++) {
            double value = all[rank * n + i];
            sum += value;
            if (value > most) most = value;
        }
        values[i] = mean ? sum / world_size : most;
    }
    free(all);
    return status;
}

tagc_status tagc_bench_max(tagc_comm *comm, double *values, int n) {
    return over_ranks(comm, values, n, 0);
}

tagc_status tagc_bench_mean(tagc_comm *comm, double *values, int n) {
    return over_ranks(comm, values, n, 1);
}

tagc_status tagc_bench_layout(const tagc_bench *bench, const tagc_fsdp_options *options, tagc_layout **out) {
    const tagc_gpt2_config *model = &bench->plan->model;
    int n_tensors = tagc_gpt2_n_tensors(model);
    tagc_tensor_info *tensors = calloc((size_t)n_tensors, sizeof *tensors);
    *out = NULL;
    if (!tensors) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a table of %d tensors", n_tensors);
    for (int i = 0; i < n_tensors; i++) tagc_gpt2_tensor(model, i, &tensors[i]);
    tagc_status status = tagc_layout_create(tensors, n_tensors, options, bench->rank->world_size, out);
    free(tensors);
    return status;
}
