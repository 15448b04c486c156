/* Failures of the runtime and of exchanges: all ranks get the error, no thread waits for ever, nothing leaks. */
#include "rig.h"

#include <math.h>

static int n_calls;

static tagc_status fail_third(device_rig *rig, int unit, const float *input, float *output) {
    (void)rig_double(rig, unit, input, output);
    if (++n_calls != 3) return TAGC_OK;
    return TAGC_ERR_MISMATCH;
}

/* An exchange that fails: its output is NaN, the others are what they should be. */
TEST(test_exchange_fails) {
    fake_reset(2, 1, FAKE_EAGER, 1);
    device_rig rig = {.exchange = fail_third};
    n_calls = 0;
    assert_int_equal(rig_make(&rig, 0, 0, 2, 3), TAGC_OK);
    rig_start(&rig);
    for (int u = 0; u < RIG_UNITS; u++) assert_int_equal(rig_enqueue(&rig, 0, u), TAGC_OK);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_MISMATCH);
    for (int u = 0; u < RIG_UNITS; u++) assert_int_equal(rig_enqueue(&rig, 1, u), TAGC_OK);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_OK); /* told once */
    assert_int_equal(rig_synchronize(&rig), 0);
    for (int u = 0; u < RIG_UNITS; u++)
        for (int i = 0; i < rig.n_elems[u]; i++) {
            assert_int_equal(isnan(rig.results[0][u][i]) != 0, u == 2);
            assert_true(rig.results[1][u][i] == 2 * rig_value(&rig, 1, u, i));
        }
    rig_join(&rig);
    rig_end(&rig);
    assert_int_equal(fake_n_mistakes(), 0);
}

/* Each call of an exchange fails once: that ticket and all later ones are handed out with the failure, before anybody
 * exchanged something for them. */
TEST(test_each_call_fails) {
    static const struct {
        const char *function;
        int n; /* of an exchange */
    } calls[] = {{"StreamIsCapturing", 1}, {"PointerGetAttributes", 2}, {"EventRecord", 3},
                 {"StreamWaitEvent", 4},   {"MemcpyAsync", 2},          {"StreamWriteValue32", 1},
                 {"StreamWaitValue32", 1}};
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
        for (int n = 1; n <= calls[c].n; n++) {
            fake_reset(3, 1, FAKE_EAGER, 1);
            device_rig rig = {0};
            assert_int_equal(rig_make(&rig, 0, 0, 3, 2), TAGC_OK);
            fake_fail(calls[c].function, 2 * calls[c].n + n, 719);
            for (int u = 0; u < RIG_UNITS; u++) {
                tagc_status status = rig_enqueue(&rig, 0, u);
                assert_int_equal(status, u < 2 ? TAGC_OK : TAGC_ERR_DEVICE);
                if (status != TAGC_OK) assert_non_null(strstr(tagc_last_error(), "a fake error (719)"));
            }
            for (int u = 0; u < RIG_UNITS; u++) { /* here, in place of the thread that exchanges */
                uint64_t number, tag;
                const void *input;
                void *output;
                tagc_status status = tagc_queue_next(rig.queue, &number, &tag, &input, &output);
                assert_int_equal(number, u + 1);
                assert_int_equal(tag, u);
                assert_true(status == TAGC_OK || status == TAGC_ERR_DEVICE);
                if (u >= 2) assert_int_equal(status, TAGC_ERR_DEVICE);
                assert_true((status == TAGC_OK) == (input != NULL && output != NULL));
                if (status == TAGC_OK) rig_double(&rig, u, input, output);
                assert_int_equal(tagc_queue_finish(rig.queue, number, status, tagc_last_error()), TAGC_OK);
            }
            assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_DEVICE);
            rig_end(&rig);
            assert_int_equal(fake_n_live(), 1); /* the caller's stream */
            assert_int_equal(fake_n_mistakes(), 0);
        }
}

/* The device fails while inputs are on the way: no flag is written any more, and whoever waits hears of it. */
TEST(test_device_breaks) {
    for (int n_before = 0; n_before < 3; n_before++) {
        fake_reset(4, 1, FAKE_LATE, 1);
        device_rig rig = {.is_late = 0};
        assert_int_equal(rig_make(&rig, 0, 0, 4, 2), TAGC_OK);
        for (int u = 0; u < RIG_UNITS; u++) assert_int_equal(rig_enqueue(&rig, 0, u), TAGC_OK);
        if (n_before) fake_settle(NULL, NULL); /* as many as there are buffers come */
        fake_break(0, 700);
        rig_start(&rig);
        assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_DEVICE);
        assert_non_null(strstr(tagc_last_error(), "an illegal memory access was encountered (700)"));
        assert_int_equal(rig_enqueue(&rig, 1, 0), TAGC_ERR_DEVICE);
        assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_DEVICE);
        rig_join(&rig);
        rig_end(&rig);
    }
}

/* So do those who wait for no exchange of their own: a larger job, which waits for all of them, and a ticket, for whose record the
 * exchange 1,024 tickets before it has to end. */
TEST(test_device_breaks_for_others) {
    for (int is_full = 0; is_full < 2; is_full++) {
        fake_reset(8, 1, FAKE_LATE, 1);
        device_rig rig = {.is_late = 0};
        assert_int_equal(rig_make(&rig, 0, 0, 8, 2), TAGC_OK);
        for (int i = 0; i < (is_full ? N_TICKETS : 1); i++)
            assert_int_equal(rig_put(&rig, 0, rig.gradients[0], rig.outputs[0], 1), TAGC_OK);
        rig_start(&rig);
        fake_break(0, 700);
        tagc_job *larger = (tagc_job *)1;
        if (is_full) {
            assert_int_equal(rig_enqueue(&rig, 0, 0), TAGC_ERR_DEVICE);
        } else {
            assert_int_equal(tagc_job_create(rig.queue, 9, 1 << 20, 1 << 20, &larger), TAGC_ERR_DEVICE);
            assert_null(larger);
        }
        assert_non_null(strstr(tagc_last_error(), "an illegal memory access was encountered (700)"));
        assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_DEVICE);
        rig_join(&rig);
        rig_end(&rig);
    }
}

/* What can be seen before anything is enqueued costs that exchange only. */
TEST(test_arguments) {
    fake_reset(5, 2, FAKE_EAGER, 1);
    device_rig rig = {0};
    assert_int_equal(rig_make(&rig, 0, 0, 5, 2), TAGC_OK);
    rig_start(&rig);
    float here[64];
    assert_int_equal(rig_put(&rig, 0, here, rig.outputs[0], 1), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "input is not in the device's memory"));
    assert_int_equal(rig.last, 1);
    assert_int_equal(rig_put(&rig, 0, rig.gradients[0], here, 1), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "output is not"));
    rig.saboteur.real.SetDevice(1);
    void *elsewhere = fake_alloc(256);
    assert_int_equal(rig_put(&rig, 0, elsewhere, rig.outputs[0], 1), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "input is on device 1, must be on device 0"));
    int current = -1;
    rig.saboteur.real.GetDevice(&current);
    assert_int_equal(current, 1); /* the caller's, as it was */
    rig.saboteur.real.SetDevice(0);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_ARGUMENT);
    assert_int_equal(rig_enqueue(&rig, 0, 0), TAGC_OK);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_OK);
    uint64_t number = 7;
    size_t n_bytes = (size_t)rig.n_elems[0] * sizeof(float);
    assert_int_equal(tagc_job_enqueue(NULL, here, n_bytes, here, n_bytes, NULL, 0, &number),
                     TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_job_enqueue(rig.jobs[0], NULL, n_bytes, here, n_bytes, NULL, 0, &number),
                     TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_job_enqueue(rig.jobs[0], rig.gradients[0], n_bytes - 4, rig.outputs[0], n_bytes,
                                      rig.caller, 1, &number),
                     TAGC_ERR_ARGUMENT);
    assert_string_equal(tagc_last_error(), "n_bytes_in is 252, must be 256: that of the job");
    assert_int_equal(tagc_job_enqueue(rig.jobs[0], rig.gradients[0], n_bytes, rig.outputs[0], n_bytes + 4,
                                      rig.caller, 1, &number),
                     TAGC_ERR_ARGUMENT);
    assert_string_equal(tagc_last_error(), "n_bytes_out is 260, must be 256: that of the job");
    assert_int_equal(number, 7); /* none of them has a ticket */
    assert_int_equal(tagc_queue_finish(rig.queue, 77, TAGC_OK, NULL), TAGC_ERR_STATE);
    tagc_job *job = (tagc_job *)1;
    assert_int_equal(tagc_job_create(rig.queue, 0, 0, 4, &job), TAGC_ERR_ARGUMENT);
    assert_null(job);
    tagc_queue *queue = (tagc_queue *)1;
    assert_int_equal(tagc_queue_create(rig.device, NULL, 17, &queue), TAGC_ERR_ARGUMENT);
    assert_null(queue);
    rig_join(&rig);
    assert_int_equal(rig_enqueue(&rig, 0, 0), TAGC_ERR_STATE); /* closed */
    rig_end(&rig);
    fake_free(elsewhere);
    tagc_queue_destroy(NULL);
    tagc_queue_close(NULL);
    tagc_job_destroy(NULL);
    assert_int_equal(fake_n_mistakes(), 0);
}

/* No thread exchanges: closing wakes all that wait. */
TEST(test_close) {
    fake_reset(6, 1, FAKE_EAGER, 1);
    device_rig rig = {0};
    assert_int_equal(rig_make(&rig, 0, 0, 6, 2), TAGC_OK);
    for (int u = 0; u < RIG_UNITS; u++) assert_int_equal(rig_enqueue(&rig, 0, u), TAGC_OK);
    while (!rig_n_ready(rig.queue)) {
    }
    tagc_queue_close(rig.queue);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_STATE);
    assert_int_equal(rig_synchronize(&rig), 0);
    rig_end(&rig);
    assert_int_equal(fake_n_live(), 1);
    assert_int_equal(fake_n_mistakes(), 0);
}

/* Making fails at every call in turn. */
TEST(test_making_fails) {
    static const char *const calls[] = {"StreamCreateWithPriority",
                                        "DeviceGetStreamPriorityRange",
                                        "EventCreateWithFlags",
                                        "HostAlloc",
                                        "StreamSynchronize",
                                        "StreamWriteValue32",
                                        "StreamWaitValue32",
                                        "HostGetDevicePointer",
                                        "MemsetAsync",
                                        "MemcpyAsync",
                                        "FreeAsync",
                                        "MallocAsync"};
    int n_failed = 0;
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
        for (int n = 1; n <= 6; n++) {
            fake_reset(7, 1, FAKE_EAGER, 1);
            tagc_device *device;
            assert_int_equal(tagc_device_open("cuda", NULL, 0, &device), TAGC_OK);
            fake_fail(calls[c], n, 2);
            tagc_queue *queue = NULL;
            tagc_job *job = NULL;
            tagc_status status = tagc_queue_create(device, NULL, 2, &queue);
            if (status == TAGC_OK) status = tagc_job_create(queue, 0, 64, 32, &job);
            n_failed += status != TAGC_OK;
            if (status != TAGC_OK) {
                assert_int_equal(status, TAGC_ERR_DEVICE);
                assert_non_null(strstr(tagc_last_error(), "a fake error (2)"));
                assert_null(job);
            }
            if (queue && status != TAGC_OK) /* once more, and it goes */
                assert_int_equal(tagc_job_create(queue, 0, 64, 32, &job), TAGC_OK);
            tagc_job_destroy(job);
            tagc_queue_destroy(queue);
            tagc_device_close(device);
            assert_int_equal(fake_n_live(), 0);
            assert_int_equal(fake_n_mistakes(), 0);
        }
    assert_int_equal(n_failed,
                     2 + 2 + 6 + 6 + 4 + 1 + 2 + 2 + 1 + 2 + 1 + 0); /* without memory copies are not tried */
}

int main(void) {
    int n_failed = test_run(NULL, NULL);
    fake_reset(1, 1, FAKE_LATE, 1);
    return n_failed;
}
