/* Any bytes as a bench or lab result: an error, or points that can be simulated. */
#include "plan/profile.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static tagc_status read_engine(const json_t *options, tagc_fsdp_options *out) {
    tagc_fsdp_options_init(out);
    int n = (int)json_object_size(options);
    out->sharding = n % 4;
    out->reducer.exchange = n / 4 % 4;
    out->mild.exchange = n % 2 ? TAGC_EXCHANGE_DIRECT : TAGC_EXCHANGE_DENSE;
    out->two_level = n % 2;
    out->ranks_per_host = 1 + n % 3;
    tagc_fsdp_options_resolve(out);
    return TAGC_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/tagc-fuzz-profile-%ld", (long)getpid());
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, n_bytes, file) != n_bytes || fclose(file)) abort();
    tagc_points points = {0};
    if (tagc_points_read(&points, path, read_engine) == TAGC_OK)
        for (int i = 0; i < points.n_points; i++) {
            const tagc_point *p = &points.points[i];
            if (!(p->total_s > 0) || !(p->union_density <= 1) || !(p->setup.sent_density <= 1) ||
                p->setup.world_size < 1 || p->setup.world_size % p->setup.n_hosts != 0 ||
                tagc_gpt2_config_check(&p->setup.model) != TAGC_OK)
                abort();
        }
    tagc_points_destroy(&points);
    unlink(path);
    return 0;
}
