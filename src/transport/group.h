/* Some ranks of a comm as a comm of their own, without connections of its own: what the group's comm sends, the comm
 * that it is of sends, on lanes that ranks outside do not count. */
#ifndef TAGC_TRANSPORT_GROUP_H
#define TAGC_TRANSPORT_GROUP_H

#include "tagc/tagc.h"

/* Groups that one rank is in at the same time are of different kinds. */
typedef enum tagc_group_kind { TAGC_GROUP_NEAR = 1, TAGC_GROUP_FAR = 2 } tagc_group_kind;

/* Collective over the group: ranks first, first + stride, ... of `parent`, n of them, this rank among them. Bytes and
 * events count for the group's comm alone. Destroy it before the parent. TAGC_ERR_UNSUPPORTED where the parent's transport
 * lacks TAGC_TRANSPORT_GROUPS. */
tagc_status tagc_comm_create_group(tagc_comm *parent, tagc_group_kind kind, int first, int stride, int n,
                                   tagc_comm **out);

#endif
