/* For programs without a main() of their own: the linker takes it only there. */
#include "test.h"

int main(int argc, char **argv) {
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    return test_run(NULL, NULL);
}
