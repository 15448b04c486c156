/* Whether compression pays: the one answer of tagc bench, tagc plan and tagc.torch.advise(). */
#include "tagc/tagc.h"

#include <math.h>

static int is_time(double seconds) {
    return isfinite(seconds) && seconds > 0;
}

/* The margin is of the shorter step, so that exchanging both turns "pays" into "costs". */
tagc_verdict tagc_verdict_of(double baseline_s, double compressed_s, double spread_s) {
    if (!is_time(baseline_s) || !is_time(compressed_s) || !isfinite(spread_s) || spread_s < 0)
        return TAGC_VERDICT_UNKNOWN;
    double longer_s = fmax(baseline_s, compressed_s), shorter_s = fmin(baseline_s, compressed_s);
    if (longer_s <= shorter_s * (1 + TAGC_VERDICT_MARGIN) || longer_s - shorter_s <= spread_s)
        return TAGC_VERDICT_NO_DIFFERENCE;
    return compressed_s < baseline_s ? TAGC_VERDICT_PAYS : TAGC_VERDICT_COSTS;
}

const char *tagc_verdict_name(int verdict) {
    static const char *const names[] = {"unknown", "pays", "makes no difference", "costs"};
    return verdict >= 0 && verdict < (int)(sizeof names / sizeof *names) ? names[verdict] : "?";
}
