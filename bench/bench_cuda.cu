/* The codec's kernels against a copy on the device. Needs a GPU and libtagc-cuda.so's sources; scripts/gpu.sh builds and runs it.
 *
 * A sweep is what reading a gradient and a residual and writing a residual takes at the rate of a copy on the device, measured in
 * the same run: 12 bytes per element in fp32, and 4 with what compress() has by default under mixed precision, gradients in bf16
 * and residuals in int8. Printed in sweeps of each kind: encode (selection, positions, values, what is lost), decode of
 * one body that is added, and both; for 162 M values in one batch, and summed over the units of GPT-2 with 162 M parameters,
 * one batch each; beside them what others do on as many values: cuda_peers.cuh. torch.topk is in torch_gpu.py.
 *
 * First come the fragments of a unit of 7 B parameters, in microseconds and in bytes per value at the copy's rate: alone, and beside products of
 * matrices in another stream, from a stream of either priority.
 *
 *   bench_cuda [FILE for JSON] [units]     units: only these */
#include "gpu/cuda/host.cuh"
extern "C" const tagc_maker *tagc_cuda_maker(void);

#include "cuda_load.cuh"
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

/* How gradients and residuals are stored, and where. residual[0] is read and residual[1] written. */
struct kind {
    const char *name, *key;
    int gradient_format, residual_format;
    double sweep_bytes; /* per element */
    const char *gradient;
    char *residual[2];
};

static size_t value_bytes(const kind &k) {
    return k.gradient_format == TAGC_FORMAT_BF16 ? 2 : 4;
}

static __global__ void narrow(const float *from, uint16_t *to, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        to[i] = (uint16_t)(__float_as_uint(from[i]) >> 16);
}

/* Another stream's work, of which there is always more to come. */
class load {
  public:
    load() {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        for (float *&matrix : matrices) {
            matrix = device_array<float>((size_t)N * N);
            check(cudaMemsetAsync(matrix, 0, (size_t)N * N * sizeof(float), stream), "a matrix");
        }
        for (cudaEvent_t &one : events)
            check(cudaEventCreateWithFlags(&one, cudaEventDisableTiming), "event");
        multiply_once();
        check(cudaStreamSynchronize(stream), "a product");
    }
    void fill_up() {
        while (n_done < n_launched && cudaEventQuery(events[n_done % N_AHEAD]) == cudaSuccess) n_done++;
        (void)cudaGetLastError(); /* not ready */
        while (n_launched < n_done + N_AHEAD) {
            multiply_once();
            check(cudaEventRecord(events[n_launched++ % N_AHEAD], stream), "event");
        }
    }
    void finish() {
        check(cudaStreamSynchronize(stream), "products");
    }

  private:
    enum { N = 2048, N_AHEAD = 24 };
    void multiply_once() {
        multiply<<<dim3(N / 16, N / 16), dim3(16, 16), 0, stream>>>(matrices[0], matrices[1], matrices[2], N);
    }
    cudaStream_t stream;
    float *matrices[3];
    cudaEvent_t events[N_AHEAD];
    uint64_t n_launched = 0, n_done = 0;
};

/* An encode that reads zeros leaves residuals of the kind that training has; the next one, which is timed, reads them. */
template <typename preparation>
static double time_encode(cudaStream_t stream, std::vector<tagc_batch_row> &rows, tagc_batch_result *results,
                          const kind &k, preparation before) {
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    char *work = device_array<char>(maker->work_bytes(TAGC_BATCH_ENCODE, rows.data(), rows.size(), 1));
    tagc_batch *batch;
    check_tagc(
        maker->create(TAGC_BATCH_ENCODE, rows.data(), rows.size(), results, work, nullptr, stream, &batch),
        "encode");
    if (k.residual_format != TAGC_FORMAT_FP32) {
        check_tagc(maker->run(batch), "encode");
        for (tagc_batch_row &row : rows) {
            const void *was_in = row.residual_in;
            row.residual_in = row.residual_out;
            row.residual_out = const_cast<void *>(was_in);
        }
        check_tagc(maker->point(batch, rows.data(), results), "encode");
    }
    const double seconds = seconds_of(
        stream, [&] { check_tagc(maker->run(batch), "encode"); }, before);
    maker->destroy(batch);
    check(cudaFree(work), "memory");
    return seconds;
}

template <typename preparation>
static times measure(cudaStream_t stream, const std::vector<unit> &units, double sparsity, int values,
                     const kind &k, float *sums, preparation before) {
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    std::vector<tagc_batch_row> rows;
    std::vector<uint8_t *> bodies;
    size_t at = 0, at_bytes = 0;
    for (const unit &u : units)
        for (size_t r = 0; r < u.n_rows; r++, at += u.shard) {
            tagc_batch_row row = {};
            row.options.n = u.shard;
            row.options.k = (size_t)((1 - sparsity) * (double)u.shard);
            row.options.sparse = 1;
            row.options.values = values;
            row.options.block = 128;
            row.options.gradient = k.gradient_format;
            row.options.residual = k.residual_format;
            row.gradient = k.gradient + at * value_bytes(k);
            row.residual_in = k.residual[0] + at_bytes;
            row.residual_out = k.residual[1] + at_bytes;
            row.seed = (uint32_t)rows.size();
            at_bytes += tagc_aligned(tagc_residual_bytes(k.residual_format, u.shard));
            row.sums = sums + at;
            row.scale = 0.125f;
            row.adds = 1;
            row.body = device_array<uint8_t>(u.shard * 4 + 65536); /* more than any body of these options */
            bodies.push_back(row.body);
            rows.push_back(row);
        }
    tagc_batch_result *results = device_array<tagc_batch_result>(rows.size());
    times t;
    t.encode = time_encode(stream, rows, results, k, before);

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
    char *work = device_array<char>(maker->work_bytes(TAGC_BATCH_DECODE, rows.data(), rows.size(), 1));
    tagc_batch *batch;
    check_tagc(
        maker->create(TAGC_BATCH_DECODE, rows.data(), rows.size(), results, work, nullptr, stream, &batch),
        "decode");
    t.decode = seconds_of(
        stream, [&] { check_tagc(maker->run(batch), "decode"); }, before);
    maker->destroy(batch);
    check(cudaFree(work), "memory");
    check(cudaFree(results), "memory");
    for (uint8_t *body : bodies) check(cudaFree(body), "memory");
    return t;
}

static void nothing_before() {
}

/* Fragments of a unit of 7 B parameters on 2 hosts of 8 GPUs: of its large matrices after the sum within a host, and where all ranks
 * are hosts. */
static void measure_units(const kind &k, float *sums, double per_byte, FILE *json) {
    const unit shapes[] = {{12582912, 2}, {395264, 64}};
    int least, greatest, is_first = 1;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
    printf("%s, 95 %% zeros, us, and bytes per value at the copy's rate\n", k.name);
    if (json) fprintf(json, ", \"units_7b\": [");
    for (const unit &shape : shapes) {
        load beside;
        const double n = (double)(shape.shard * shape.n_rows);
        for (int is_beside = 0; is_beside < 2; is_beside++)
            for (int priority : {least, greatest}) {
                cudaStream_t stream;
                check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority), "stream");
                auto before = [&] {
                    if (is_beside) beside.fill_up();
                };
                const times t = measure(stream, {shape}, 0.95, TAGC_FORMAT_INT2, k, sums, before);
                beside.finish();
                check(cudaStreamDestroy(stream), "stream");
                printf("%3zu x %8zu, %-16s priority %2d: encode %9.1f (%6.2f), decode %9.1f (%6.2f)\n",
                       shape.n_rows, shape.shard, is_beside ? "beside products," : "alone,", priority,
                       t.encode * 1e6, t.encode / per_byte / n, t.decode * 1e6, t.decode / per_byte / n);
                fflush(stdout);
                if (json)
                    fprintf(
                        json,
                        "%s\n {\"rows\": %zu, \"n\": %zu, \"beside\": %d, \"priority\": %d, \"encode_s\": "
                        "%.4g, \"decode_s\": %.4g}",
                        is_first ? "" : ",", shape.n_rows, shape.shard, is_beside, priority, t.encode,
                        t.decode);
                is_first = 0;
            }
    }
    if (json) fprintf(json, "]");
}

/* Prints the times of a kind, and writes them to json, with the kind's key before their names. */
static void measure_kind(cudaStream_t stream, const std::vector<unit> &units, const kind &k, size_t n,
                         float *sums, double per_byte, FILE *json) {
    const double sweep = k.sweep_bytes * (double)n * per_byte;
    printf("%s: a sweep takes %.3f ms\n", k.name, sweep * 1e3);
    for (double sparsity : {0.95, 0.99}) {
        const times one =
            measure(stream, {{n / N_RANKS, N_RANKS}}, sparsity, TAGC_FORMAT_INT2, k, sums, nothing_before);
        printf("one batch, %.0f %% zeros       %9.2f %9.2f %9.2f\n", sparsity * 100, one.encode / sweep,
               one.decode / sweep, (one.encode + one.decode) / sweep);
        times all = {0, 0};
        double sweeps = 0;
        for (const unit &u : units) {
            const times t = measure(stream, {u}, sparsity, TAGC_FORMAT_INT2, k, sums, nothing_before);
            all.encode += t.encode;
            all.decode += t.decode;
            sweeps += k.sweep_bytes * (double)(u.shard * u.n_rows) * per_byte;
        }
        printf("a batch per unit, %.0f %% zeros %8.2f %9.2f %9.2f\n", sparsity * 100, all.encode / sweeps,
               all.decode / sweeps, (all.encode + all.decode) / sweeps);
        if (json)
            fprintf(json, ", \"%sone_batch_%.0f\": [%.4g, %.4g], \"%sunits_%.0f\": [%.4g, %.4g]", k.key,
                    sparsity * 100, one.encode / sweep, one.decode / sweep, k.key, sparsity * 100,
                    all.encode / sweeps, all.decode / sweeps);
    }
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
    if (json) fprintf(json, "{\"device\": \"%s\", \"copy_bytes_per_s\": %.4g", device.name, 1 / per_byte);
    /* Rows of several units, each aligned, and exponents before the codes: 2 bytes per value is more than enough. */
    uint16_t *halves = device_array<uint16_t>(n);
    char *codes[2] = {device_array<char>(2 * n), device_array<char>(2 * n)};
    narrow<<<1024, 256, 0, stream>>>(gradient, halves, n);
    check(cudaMemsetAsync(codes[0], 0, 2 * n, stream), "residuals");
    char *floats = reinterpret_cast<char *>(residual);
    const kind kinds[] = {{"fp32, residual fp32",
                           "",
                           TAGC_FORMAT_FP32,
                           TAGC_FORMAT_FP32,
                           12,
                           reinterpret_cast<const char *>(gradient),
                           {floats, floats}},
                          {"bf16, residual int8",
                           "bf16_int8_",
                           TAGC_FORMAT_BF16,
                           TAGC_FORMAT_INT8,
                           4,
                           reinterpret_cast<const char *>(halves),
                           {codes[0], codes[1]}}};
    check(cudaStreamSynchronize(stream), "values");
    measure_units(kinds[1], sums, per_byte, json);
    if (argc < 3) {
        printf("%-28s %9s %9s %9s  (sweeps)\n", "", "encode", "decode", "both");
        for (const kind &k : kinds) measure_kind(stream, units, k, n, sums, per_byte, json);
        measure_peers(stream, gradient, residual, sums, n, sweep, json);
    }
    if (json) {
        fprintf(json, "}\n");
        if (fclose(json)) return 1;
    }
    return 0;
}
