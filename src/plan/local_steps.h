/* Local steps in the cost model: a site is a deployment of its own, and each of its steps bears 1/H of a round. */
#ifndef TAGC_PLAN_LOCAL_STEPS_H
#define TAGC_PLAN_LOCAL_STEPS_H

#include "plan/plan.h"

/* As tagc_plan_count and tagc_plan_simulate, for engines with local_steps. Figures are means over the steps of a round. */
tagc_status tagc_plan_count_local(const tagc_setup *setup, tagc_plan_volume *volume,
                                  tagc_plan_memory *memory);
tagc_status tagc_plan_simulate_local(const tagc_setup *setup, const tagc_costs *costs,
                                     const tagc_plan_link *link, tagc_forecast *out);

#endif
