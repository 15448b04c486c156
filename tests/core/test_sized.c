/* Structs between callers and libraries of other versions: what is read, written and refused, byte by byte. */
#include <string.h>

#include "../test.h"
#include "core/sized.h"

typedef struct here { /* as the library has it */
    size_t struct_bytes;
    int first, second;
    double third;
} here;

enum { FIRST_VERSION = offsetof(here, third) /* 16 */, MOST = 4096, FILL = 0xa5 };
static const here defaults = {.first = 1, .second = -2, .third = 3.5};
static const tagc_sized type = {"tagc_here", sizeof(here), FIRST_VERSION, &defaults};

TEST(init_fills_what_the_caller_has) {
    unsigned char bytes[64];
    for (size_t n = 0; n <= 48; n++) {
        here expected = defaults;
        memset(bytes, FILL, sizeof bytes);
        tagc_sized_init(&type, bytes, n);
        expected.struct_bytes = n;
        size_t n_known = n < sizeof(size_t) ? 0 : n < sizeof expected ? n : sizeof expected;
        assert_memory_equal(bytes, &expected, n_known);
        for (size_t i = n_known; i < sizeof bytes; i++)
            assert_int_equal(bytes[i], n_known > 0 && i < n ? 0 : FILL);
    }
    tagc_sized_init(&type, NULL, 32);
}

TEST(reading_completes_or_refuses) {
    unsigned char bytes[MOST + 1];
    here got, expected;
    for (size_t n = 0; n <= 48; n++) {
        memset(bytes, 0, sizeof bytes);
        for (size_t i = sizeof n; i < n && i < sizeof(here); i++) bytes[i] = (unsigned char)(i * 7 + 1);
        memcpy(bytes, &n, sizeof n);
        tagc_status status = tagc_sized_read(&type, bytes, &got);
        assert_int_equal(status, n < FIRST_VERSION ? TAGC_ERR_ARGUMENT : TAGC_OK);
        if (status != TAGC_OK) {
            assert_non_null(strstr(tagc_last_error(), "struct_bytes of tagc_here is ") &&
                            strstr(tagc_last_error(), ", must be in [16, 4096]: call tagc_here_init first"));
            continue;
        }
        expected = defaults; /* where the caller's header has no field */
        memcpy(&expected, bytes, n < sizeof expected ? n : sizeof expected);
        expected.struct_bytes = sizeof expected;
        assert_memory_equal(&got, &expected, sizeof got);
        for (size_t i = sizeof(here); i < n; i++) { /* any bit behind the fields that are known here */
            bytes[i] = 0x80;
            assert_int_equal(tagc_sized_read(&type, bytes, &got), TAGC_ERR_ARGUMENT);
            assert_non_null(strstr(tagc_last_error(), "and is not zero at byte"));
            bytes[i] = 0;
        }
    }
    size_t n = MOST;
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, &n, sizeof n);
    assert_int_equal(tagc_sized_read(&type, bytes, &got), TAGC_OK);
    n++; /* no caller has so large a struct: memory that was never written */
    memcpy(bytes, &n, sizeof n);
    assert_int_equal(tagc_sized_read(&type, bytes, &got), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_sized_check(&type, bytes), TAGC_ERR_ARGUMENT);
}

TEST(writing_keeps_to_the_caller) {
    unsigned char bytes[64];
    const here from = {sizeof from, 10, 20, 30.25};
    for (size_t n = FIRST_VERSION; n <= 48; n++) {
        here expected = from;
        memset(bytes, FILL, sizeof bytes);
        memcpy(bytes, &n, sizeof n);
        tagc_sized_write(&type, &from, bytes);
        expected.struct_bytes = n; /* stays the caller's */
        size_t n_known = n < sizeof expected ? n : sizeof expected;
        assert_memory_equal(bytes, &expected, n_known);
        for (size_t i = n_known; i < sizeof bytes; i++) assert_int_equal(bytes[i], i < n ? 0 : FILL);
    }
}
