/* The codec's kernels against a copy on the device. Needs a GPU and libtagc-cuda.so's sources; scripts/gpu.sh builds and runs it.
 *
 * A sweep is what reading a gradient and a residual and writing a residual takes: 12 bytes per element at the rate of a copy on
 * the device, measured in the same run. Printed in sweeps: encode (selection, positions, values, what is lost), decode of
 * one body that is added, and both; for 162 M values in one batch, and summed over the units of GPT-2 with 162 M parameters,
 * one batch each; beside them what others do on as many values: cuda_peers.cuh. torch.topk is in torch_gpu.py. */
#include "gpu/cuda/host.cuh"
extern "C" const tagc_maker *tagc_cuda_maker(void);

#include "cuda_measure.cuh"
#include "cuda_peers.cuh"

enum { N_RANKS = 8 };

static void check_tagc(tagc_status status, const char *what) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "bench_cuda: %s: %s\n", what, tagc_cuda_maker()->batches->last_error());
    exit(1);
}

/* A unit: rows of `shard` values each. */
struct unit {
    size_t shard, n_rows;
};

struct times {
    double encode, decode;
};

static times measure(cudaStream_t stream, const std::vector<unit> &units, double sparsity, int values,
                     const float *gradient, float *residual, float *sums) {
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    std::vector<tagc_batch_row> rows;
    std::vector<uint8_t *> bodies;
    size_t at = 0;
    for (const unit &u : units)
        for (size_t r = 0; r < u.n_rows; r++, at += u.shard) {
            tagc_batch_row row = {};
            row.options.n = u.shard;
            row.options.k = (size_t)((1 - sparsity) * (double)u.shard);
            row.options.sparse = 1;
            row.options.values = values;
            row.options.block = 128;
            row.gradient = gradient + at;
            row.residual_in = residual + at;
            row.residual_out = residual + at;
            row.sums = sums + at;
            row.scale = 0.125f;
            row.adds = 1;
            row.body = device_array<uint8_t>(u.shard * 4 + 65536); /* more than any body of these options */
            bodies.push_back(row.body);
            rows.push_back(row);
        }
    tagc_batch_result *results = device_array<tagc_batch_result>(rows.size());
    char *work = device_array<char>(maker->work_bytes(TAGC_BATCH_ENCODE, rows.data(), rows.size(), 1));
    tagc_batch *batch;
    check_tagc(
        maker->create(TAGC_BATCH_ENCODE, rows.data(), rows.size(), results, work, nullptr, stream, &batch),
        "encode");
    times t;
    t.encode = seconds_of(stream, [&] { check_tagc(maker->run(batch), "encode"); });
    maker->destroy(batch);
    check(cudaFree(work), "memory");

    std::vector<tagc_batch_result> found(rows.size());
    std::vector<tagc_body> list(rows.size());
    check(cudaMemcpy(found.data(), results, found.size() * sizeof found[0], cudaMemcpyDeviceToHost),
          "results");
    for (size_t i = 0; i < rows.size(); i++) {
        list[i].bytes = bodies[i];
        list[i].n_bytes = found[i].encoded.n_bytes;
        rows[i].bodies = &list[i];
        rows[i].n_bodies = 1;
    }
    work = device_array<char>(maker->work_bytes(TAGC_BATCH_DECODE, rows.data(), rows.size(), 1));
    check_tagc(
        maker->create(TAGC_BATCH_DECODE, rows.data(), rows.size(), results, work, nullptr, stream, &batch),
        "decode");
    t.decode = seconds_of(stream, [&] { check_tagc(maker->run(batch), "decode"); });
    maker->destroy(batch);
    check(cudaFree(work), "memory");
    check(cudaFree(results), "memory");
    for (uint8_t *body : bodies) check(cudaFree(body), "memory");
    return t;
}

int main(int argc, char **argv) {
    cudaDeviceProp device;
    int n_devices = 0;
    cudaError_t code = cudaGetDeviceCount(&n_devices);
    if (code != cudaSuccess || n_devices == 0) {
        fprintf(stderr, "bench_cuda: no GPU: %s\n",
                code == cudaSuccess ? "none is there" : cudaGetErrorString(code));
        return 77;
    }
    check(cudaGetDeviceProperties(&device, 0), "device");
    const size_t n = (size_t)162 << 20;
    /* GPT-2 162M, untied: two tables and twelve blocks, each a unit, over 8 ranks. */
    std::vector<unit> units = {{(size_t)(50304 + 1024) * 768 / N_RANKS, N_RANKS},
                               {(size_t)50304 * 768 / N_RANKS, N_RANKS}};
    for (int i = 0; i < 12; i++) units.push_back({(size_t)7087872 / N_RANKS, N_RANKS});
    float *gradient = device_array<float>(n), *residual = device_array<float>(n),
          *sums = device_array<float>(n);
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "stream");
    fill<<<1024, 256, 0, stream>>>(gradient, n, 1);
    fill<<<1024, 256, 0, stream>>>(residual, n, 2);
    fill<<<1024, 256, 0, stream>>>(sums, n, 3);
    const double copy = seconds_of(stream, [&] {
        check(cudaMemcpyAsync(sums, gradient, n * sizeof(float), cudaMemcpyDeviceToDevice, stream), "copy");
    });
    const double per_byte = copy / (8.0 * (double)n), sweep = 12.0 * (double)n * per_byte;
    FILE *json = argc > 1 ? fopen(argv[1], "w") : nullptr;
    printf("%s, copy %.0f GB/s, a sweep over %zu values %.3f ms\n", device.name, 1e-9 / per_byte, n,
           sweep * 1e3);
    printf("%-28s %9s %9s %9s  (sweeps)\n", "", "encode", "decode", "both");
    if (json) fprintf(json, "{\"device\": \"%s\", \"copy_bytes_per_s\": %.4g", device.name, 1 / per_byte);
    for (double sparsity : {0.95, 0.99}) {
        const times one =
            measure(stream, {{n / N_RANKS, N_RANKS}}, sparsity, TAGC_FORMAT_INT2, gradient, residual, sums);
        printf("one batch, %.0f %% zeros       %9.2f %9.2f %9.2f\n", sparsity * 100, one.encode / sweep,
               one.decode / sweep, (one.encode + one.decode) / sweep);
        times all = {0, 0};
        double sweeps = 0;
        for (const unit &u : units) {
            const times t = measure(stream, {u}, sparsity, TAGC_FORMAT_INT2, gradient, residual, sums);
            all.encode += t.encode;
            all.decode += t.decode;
            sweeps += 12.0 * (double)(u.shard * u.n_rows) * per_byte;
        }
        printf("a batch per unit, %.0f %% zeros %8.2f %9.2f %9.2f\n", sparsity * 100, all.encode / sweeps,
               all.decode / sweeps, (all.encode + all.decode) / sweeps);
        if (json)
            fprintf(json, ", \"one_batch_%.0f\": [%.4g, %.4g], \"units_%.0f\": [%.4g, %.4g]", sparsity * 100,
                    one.encode / sweep, one.decode / sweep, sparsity * 100, all.encode / sweeps,
                    all.decode / sweeps);
    }
    measure_peers(stream, gradient, residual, sums, n, sweep, json);
    if (json) {
        fprintf(json, "}\n");
        if (fclose(json)) return 1;
    }
    return 0;
}
