/* What is behind a fence is there, or asking for it names the option that builds it. */
#include "../ranks.h"
#include "tagc/device.h"
#include "tagc/native.h"
#include "tagc/paper.h"

static void expect_refusal(tagc_status status, const char *option) {
    assert_int_equal(status, TAGC_ERR_UNSUPPORTED);
    if (!strstr(tagc_last_error(), option)) fail_msg("\"%s\" does not name %s", tagc_last_error(), option);
}

TEST(exchanges_as_published) {
    tagc_comm *comm = comm_alone(NULL);
    for (int exchange = TAGC_EXCHANGE_SKETCH; exchange <= TAGC_EXCHANGE_DIRECT; exchange++) {
        int is_fenced = exchange == TAGC_EXCHANGE_SKETCH || exchange == TAGC_EXCHANGE_PACKED;
        tagc_reducer_options options;
        tagc_paper_options paper;
        tagc_reducer *reducer;
        tagc_reducer_options_init(&options);
        tagc_paper_options_init(&paper);
        assert_int_equal(paper.struct_bytes, sizeof paper);
        options.n_elems = 64;
        options.exchange = exchange;
        if (is_fenced) options.paper = &paper;
        tagc_status status = tagc_reducer_create(comm, &options, &reducer);
        if (!is_fenced || TAGC_HAS_PAPER)
            assert_int_equal(status, TAGC_OK);
        else
            expect_refusal(status, "TAGC_PAPER=ON");
        tagc_reducer_destroy(reducer);
    }
    tagc_comm_destroy(comm);
}

TEST(devices) {
    tagc_device *device;
    tagc_status status = tagc_device_open("abacus", NULL, 0, &device);
    assert_int_not_equal(status, TAGC_OK);
    assert_null(device);
    assert_int_equal(strstr(tagc_last_error(), "TAGC_GPU") != NULL, !TAGC_HAS_GPU);
}

TEST(native_transport) {
    tagc_native_options options;
    tagc_native *native;
    tagc_comm *comm;
    tagc_native_options_init(&options);
    assert_int_equal(options.struct_bytes, sizeof options);
    options.local = "127.0.0.1";
    tagc_status status = tagc_native_open(&options, 0, 1, &native);
    if (TAGC_HAS_NATIVE) {
        unsigned char address[TAGC_NATIVE_ADDRESS_BYTES], keys[2 * TAGC_NATIVE_KEY_BYTES] = {0};
        assert_int_equal(status, TAGC_OK);
        assert_int_equal(tagc_native_address(native, address), TAGC_OK);
        assert_int_equal(tagc_native_connect(native, address, keys, 10), TAGC_OK);
        assert_int_equal(tagc_comm_create_native(native, NULL, &comm), TAGC_OK);
        assert_int_equal(tagc_comm_barrier(comm), TAGC_OK);
        tagc_comm_destroy(comm);
        return;
    }
    expect_refusal(status, "TAGC_NATIVE=ON");
    assert_null(native);
    expect_refusal(tagc_comm_create_native(native, NULL, &comm), "TAGC_NATIVE=ON");
    assert_null(comm);
}
