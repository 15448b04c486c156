/* SHA-256 and HMAC against FIPS 180-4, RFC 4231 and Python's hashlib and hmac. */
#include "../test.h"
#include "core/sha256.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void hash_of(const void *bytes, size_t n_bytes, unsigned char *out) {
    tagc_sha256 hash;
    tagc_sha256_begin(&hash);
    tagc_sha256_add(&hash, bytes, n_bytes);
    tagc_sha256_end(&hash, out);
}

static void assert_hex(const unsigned char *found, const char *expected) {
    char text[2 * TAGC_SHA256_BYTES + 1];
    for (size_t i = 0; i < TAGC_SHA256_BYTES; i++) snprintf(text + 2 * i, 3, "%02x", found[i]);
    assert_string_equal(text, expected);
}

TEST(examples_of_fips) {
    static const char *const two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    unsigned char out[TAGC_SHA256_BYTES], thousand[1000];
    hash_of("abc", 3, out);
    assert_hex(out, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    hash_of(NULL, 0, out);
    assert_hex(out, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    hash_of(two, strlen(two), out);
    assert_hex(out, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    tagc_sha256 hash;
    memset(thousand, 'a', sizeof thousand);
    tagc_sha256_begin(&hash);
    for (int i = 0; i < 1000; i++) tagc_sha256_add(&hash, thousand, sizeof thousand);
    tagc_sha256_end(&hash, out);
    assert_hex(out, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(cases_of_rfc_4231) {
    static const char
        large[] = "Test Using Larger Than Block-Size Key - Hash Key First",
        both[] = "This is a test using a larger than block-size key and a larger than block-size data. "
                 "The key needs to be hashed before being used by the HMAC algorithm.";
    unsigned char aa[131], dd[50], cd[50], b0b[20], counted[25], out[TAGC_SHA256_BYTES];
    memset(aa, 0xaa, sizeof aa);
    memset(dd, 0xdd, sizeof dd);
    memset(cd, 0xcd, sizeof cd);
    memset(b0b, 0x0b, sizeof b0b);
    for (size_t i = 0; i < sizeof counted; i++) counted[i] = (unsigned char)(i + 1);
    const struct {
        const void *key;
        size_t n_key;
        const void *data;
        size_t n_data;
        const char *mac;
    } cases[] = {
        {b0b, 20, "Hi There", 8, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {"Jefe", 4, "what do ya want for nothing?", 28,
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {aa, 20, dd, 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {counted, 25, cd, 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
        {aa, 131, large, sizeof large - 1,
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {aa, 131, both, sizeof both - 1, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tagc_hmac_sha256(cases[i].key, cases[i].n_key, cases[i].data, cases[i].n_data, out);
        assert_hex(out, cases[i].mac);
    }
}

/* Every length to 1,000, and keys to 199, in one hash:
 *
 *   data = bytes((i * 7 + (i >> 8)) & 255 for i in range(1000))
 *   for n in range(1001):
 *       hashes.update(hashlib.sha256(data[:n]).digest())
 *       macs.update(hmac.digest(data[:n % 200], data[:n], "sha256")) */
TEST(all_lengths_as_in_python) {
    enum { MOST = 1000 };
    unsigned char data[MOST], out[TAGC_SHA256_BYTES];
    tagc_sha256 hashes, macs;
    for (int i = 0; i < MOST; i++) data[i] = (unsigned char)(i * 7 + (i >> 8));
    tagc_sha256_begin(&hashes);
    tagc_sha256_begin(&macs);
    for (size_t n = 0; n <= MOST; n++) {
        hash_of(data, n, out);
        tagc_sha256_add(&hashes, out, sizeof out);
        tagc_hmac_sha256(data, n % 200, data, n, out);
        tagc_sha256_add(&macs, out, sizeof out);
    }
    tagc_sha256_end(&hashes, out);
    assert_hex(out, "1e67f63d8c60e0ece8c22863ef816243e24887524e12babda67a0a1294bea06e");
    tagc_sha256_end(&macs, out);
    assert_hex(out, "b73c853578a4e34b9ff808d0480ab26b92bdfbcb40d69b8f9c857380d4ac6ab7");
}

TEST(pieces_are_the_whole) {
    unsigned char data[300], whole[TAGC_SHA256_BYTES], out[TAGC_SHA256_BYTES];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * i);
    hash_of(data, sizeof data, whole);
    for (size_t n = 1; n < sizeof data; n++) {
        tagc_sha256 hash;
        tagc_sha256_begin(&hash);
        for (size_t at = 0; at < sizeof data; at += n)
            tagc_sha256_add(&hash, data + at, sizeof data - at < n ? sizeof data - at : n);
        tagc_sha256_end(&hash, out);
        assert_memory_equal(out, whole, sizeof out);
    }
}

TEST(one_bit_is_another_secret) {
    unsigned char a[TAGC_SHA256_BYTES] = {0}, b[TAGC_SHA256_BYTES] = {0};
    assert_true(tagc_is_same_secret(a, b, sizeof a));
    for (size_t i = 0; i < 8 * sizeof a; i++) {
        b[i / 8] ^= (unsigned char)(1 << i % 8);
        assert_false(tagc_is_same_secret(a, b, sizeof a));
        b[i / 8] = 0;
    }
}
