/* The version and the clock of the running library. */
#include "core/clock.h"
#include "tagc/tagc.h"

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)

const char *tagc_version(void) {
    return TEXT(TAGC_VERSION_MAJOR) "." TEXT(TAGC_VERSION_MINOR) "." TEXT(TAGC_VERSION_PATCH);
}

int tagc_version_number(void) {
    return TAGC_VERSION_NUMBER;
}

double tagc_time_s(void) {
    return tagc_clock_s();
}
