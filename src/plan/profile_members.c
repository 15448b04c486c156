/* Numbers of results, with errors that name the file and the place. */
#include "plan/profile_reader.h"

#include "core/status.h"
#include "files/result_file.h"
#include <math.h>
#include <stdlib.h>

tagc_status tagc_profile_missing(const tagc_profile_reader *r, const char *where, const char *name,
                                 const char *what) {
    return tagc_fail(TAGC_ERR_CORRUPT, "%s: %s%s%s is missing or not %s", r->file, where, *where ? "." : "",
                     name, what);
}

tagc_status tagc_profile_number(const tagc_profile_reader *r, const json_t *object, const char *where,
                                const char *name, double *out) {
    const json_t *value = json_object_get(object, name);
    *out = 0;
    if (!json_is_number(value) || !isfinite(json_number_value(value)))
        return tagc_profile_missing(r, where, name, "a number");
    *out = json_number_value(value);
    return TAGC_OK;
}

tagc_status tagc_profile_int(const tagc_profile_reader *r, const json_t *object, const char *where,
                             const char *name, int min, int max, int *out) {
    double value;
    TAGC_TRY(tagc_profile_number(r, object, where, name, &value));
    if (!(value >= min && value <= max))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: %s%s%s is %g, allowed is %d to %d", r->file, where,
                         *where ? "." : "", name, value, min, max);
    *out = (int)value;
    return TAGC_OK;
}

tagc_status tagc_profile_above(const tagc_profile_reader *r, const json_t *object, const char *where,
                               const char *name, double *out) {
    TAGC_TRY(tagc_profile_number(r, object, where, name, out));
    if (*out > 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_CORRUPT, "%s: %s.%s is %g, must be above 0", r->file, where, name, *out);
}

/* The median over iterations of the number of that name. */
tagc_status tagc_profile_median(const tagc_profile_reader *r, const json_t *iterations, const char *object,
                                const char *name, double *out) {
    size_t n = json_array_size(iterations);
    double *values = calloc(n + 1, sizeof *values);
    if (!values) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %zu iterations", n);
    tagc_status status =
        n > 0 ? TAGC_OK : tagc_profile_missing(r, "arms", "iterations", "a list of iterations");
    for (size_t i = 0; status == TAGC_OK && i < n; i++) {
        const json_t *from = json_array_get(iterations, i);
        if (object) from = json_object_get(from, object);
        status = tagc_profile_number(r, from, object ? "arms.iterations.phase_s" : "arms.iterations", name,
                                     &values[i]);
    }
    *out = tagc_result_spread_of(values, (int)n).median;
    free(values);
    return status;
}
