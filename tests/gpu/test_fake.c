/* The fake runtime itself: streams in order, events, and each mistake that it must find. */
#include <string.h>

#include "../test.h"
#include "fake_runtime.h"
#include "gpu/runtime.h"

static tagc_runtime runtime;
static char where[TAGC_WHERE_TEXT_BYTES];

static void begin(uint64_t seed, fake_pace pace) {
    fake_reset(seed, 1, pace, 1);
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &runtime, where), TAGC_OK);
}

static void end(const char *expected) {
    if (expected && (fake_n_mistakes() == 0 || strcmp(fake_mistake(0), expected) != 0))
        print_error("%d mistakes: %s\n", fake_n_mistakes(), fake_mistake(0));
    if (expected)
        assert_string_equal(fake_mistake(0), expected);
    else
        assert_int_equal(fake_n_mistakes(), 0);
    tagc_runtime_unbind(&runtime);
}

static int order[8], n_order;

static void note(void *arg) {
    order[n_order++] = (int)(intptr_t)arg;
}

/* Kernels of two streams: in order within each, in any order between them, unless an event says otherwise. */
TEST(test_order) {
    int n_swapped = 0;
    for (uint64_t seed = 1; seed <= 16; seed++)
        for (int with_event = 0; with_event < 2; with_event++) {
            begin(seed, FAKE_LATE);
            void *a, *b, *event;
            assert_int_equal(fake_stream(&a), 0);
            assert_int_equal(fake_stream(&b), 0);
            assert_int_equal(runtime.EventCreateWithFlags(&event, TAGC_EVENT_WITHOUT_TIMING), 0);
            n_order = 0;
            assert_int_equal(runtime.StreamWaitEvent(b, event, 0),
                             0); /* never recorded: nothing to wait for */
            fake_launch(a, note, (void *)1);
            fake_launch(a, note, (void *)2);
            runtime.EventRecord(event, a);
            if (with_event) runtime.StreamWaitEvent(b, event, 0);
            fake_launch(b, note, (void *)3);
            runtime.EventRecord(event, b); /* later than what was waited for */
            fake_launch(b, note, (void *)4);
            int done = 1;
            assert_int_equal(tagc_runtime_answer(&runtime, runtime.StreamQuery(a), &done), 0);
            assert_int_equal(done, 0);
            assert_int_equal(n_order, 0); /* late */
            assert_int_equal(runtime.StreamSynchronize(b), 0);
            assert_int_equal(runtime.StreamSynchronize(a), 0);
            assert_int_equal(tagc_runtime_answer(&runtime, cudaEventQuery(event), &done), 0);
            assert_int_equal(done, 1);
            int place[5] = {0};
            for (int i = 0; i < 4; i++) place[order[i]] = i;
            assert_true(place[1] < place[2] && place[3] < place[4]);
            if (with_event) assert_true(place[2] < place[3]);
            n_swapped += !with_event && place[3] < place[2];
            end(NULL);
        }
    assert_in_range(n_swapped, 4, 16);
}

static char seen[64];

static void look(void *arg) {
    memcpy(seen, fake_view(arg), sizeof seen);
}

static void write_ones(void *arg) {
    memset(fake_view(arg), 1, sizeof seen);
}

TEST(test_copies) {
    begin(3, FAKE_EAGER);
    void *stream, *pinned;
    char *array = fake_alloc(64);
    assert_int_equal(fake_stream(&stream), 0);
    assert_int_equal(runtime.HostAlloc(&pinned, 64, TAGC_PINNED_PORTABLE), 0);
    fake_launch(stream, write_ones, array);
    runtime.MemcpyAsync(pinned, array, 64, TAGC_COPY_TO_HOST, stream);
    runtime.StreamSynchronize(stream);
    for (int i = 0; i < 64; i++) assert_int_equal(((char *)pinned)[i], 1);
    memset(pinned, 7, 64);
    runtime.MemcpyAsync(array, pinned, 64, TAGC_COPY_TO_DEVICE, stream);
    fake_launch(stream, look, array);
    runtime.StreamSynchronize(stream);
    for (int i = 0; i < 64; i++) assert_int_equal(seen[i], 7);
    tagc_place place;
    assert_int_equal(tagc_runtime_place(&runtime, array + 5, &place), 0);
    assert_int_equal(place.is_device, 1);
    assert_int_equal(tagc_runtime_place(&runtime, pinned, &place), 0);
    assert_int_equal(place.is_device, 0);
    runtime.FreeHost(pinned);
    fake_free(array);
    end(NULL);
}

/* What the host must not do. */
TEST(test_host) {
    volatile char *memory;
    void *pinned, *stream;

    begin(1, FAKE_LATE);
    memory = fake_alloc(64);
    seen[0] = memory[5];
    end("the host touched the device's memory");

    begin(1, FAKE_LATE);
    fake_view(fake_alloc(64));
    end("the device's memory looked at outside of a kernel");

    begin(1, FAKE_LATE);
    runtime.HostAlloc(&pinned, 64, TAGC_PINNED_PORTABLE);
    runtime.FreeHost(pinned);
    ((volatile char *)pinned)[0] = 1;
    end("pinned memory used after it was freed");

    begin(1, FAKE_LATE);
    runtime.HostAlloc(&pinned, 64, TAGC_PINNED_PORTABLE);
    runtime.FreeHost(pinned);
    runtime.FreeHost(pinned);
    end("freed twice");

    begin(1, FAKE_LATE);
    fake_stream(&stream);
    runtime.HostAlloc(&pinned, 64, TAGC_PINNED_PORTABLE);
    runtime.MemcpyAsync(fake_alloc(64), pinned, 64, TAGC_COPY_TO_DEVICE, stream);
    runtime.FreeHost(pinned);
    end("freed while a copy or a flag is to come");

    begin(1, FAKE_LATE);
    fake_stream(&stream);
    runtime.HostAlloc(&pinned, 64, TAGC_PINNED_PORTABLE);
    runtime.MemcpyAsync(fake_alloc(64), pinned, 65, TAGC_COPY_TO_DEVICE, stream);
    end("a copy beyond the end of its memory");

    begin(1, FAKE_LATE);
    fake_stream(&stream);
    runtime.MemcpyAsync(fake_alloc(64), seen, 64, TAGC_COPY_TO_DEVICE, stream);
    end("a copy's host side is not pinned memory");

    begin(1, FAKE_LATE);
    fake_stream(&stream);
    runtime.StreamDestroy(stream);
    runtime.StreamSynchronize(stream);
    end("a stream that does not exist");
}

static void touch(void *arg) {
    ((volatile char *)arg)[3] = 9;
}

/* A copy takes time. Who touches its memory meanwhile is found, where the order comes out so; here it is a kernel, which
 * leaves the order to the seed alone. */
TEST(test_copy_under_way) {
    int n_found = 0;
    for (uint64_t seed = 1; seed <= 16; seed++) {
        begin(seed, FAKE_LATE);
        void *a, *b, *pinned;
        fake_stream(&a);
        fake_stream(&b);
        runtime.HostAlloc(&pinned, 64, TAGC_PINNED_PORTABLE);
        runtime.MemcpyAsync(fake_alloc(64), pinned, 64, TAGC_COPY_TO_DEVICE, a);
        fake_launch(b, touch, pinned);
        runtime.StreamSynchronize(a);
        runtime.StreamSynchronize(b);
        n_found += fake_n_mistakes() == 1 &&
                   !strcmp(fake_mistake(0), "the host touched pinned memory while a copy was under way");
        tagc_runtime_unbind(&runtime);
    }
    assert_in_range(n_found, 2, 14);
}

static void call_back(void *arg) {
    int done;
    tagc_runtime_answer(&runtime, runtime.StreamQuery(arg), &done);
}

TEST(test_host_function) {
    begin(1, FAKE_EAGER);
    void *stream;
    fake_stream(&stream);
    cudaLaunchHostFunc(stream, call_back, stream);
    runtime.StreamSynchronize(stream);
    end("a call of the runtime from a host function");
}

TEST(test_broken) {
    begin(1, FAKE_LATE);
    void *stream;
    int done;
    fake_stream(&stream);
    n_order = 0;
    cudaLaunchHostFunc(stream, note, NULL);
    fake_fail("StreamQuery", 2, 17);
    assert_int_equal(tagc_runtime_answer(&runtime, runtime.StreamQuery(stream), &done), 0);
    assert_int_equal(tagc_runtime_answer(&runtime, runtime.StreamQuery(stream), &done), 17);
    fake_break(0, 700);
    assert_int_equal(runtime.StreamSynchronize(stream), 700);
    assert_string_equal(runtime.GetErrorString(700), "an illegal memory access was encountered");
    assert_int_equal(n_order, 0); /* host functions are not called any more */
    end(NULL);
}

int main(void) {
    int n_failed = test_run(NULL, NULL);
    fake_reset(1, 1, FAKE_LATE, 1);
    return n_failed;
}
