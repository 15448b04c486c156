/* A comm for some ranks of another comm, its parent. It opens no connections: the parent carries its transfers, on lanes
 * that are reserved for groups. */
#ifndef TAGC_TRANSPORT_GROUP_H
#define TAGC_TRANSPORT_GROUP_H

#include "tagc/tagc.h"

/* Groups that one rank is in at the same time are of different kinds. */
typedef enum tagc_group_kind { TAGC_GROUP_NEAR = 1, TAGC_GROUP_FAR = 2 } tagc_group_kind;

/* Collective over the group: ranks first, first + stride, ... of `parent`, n of them, this rank among them. Only
 * the group's comm counts and traces the transfers. Destroy it before the parent. TAGC_ERR_UNSUPPORTED if the parent's transport
 * lacks TAGC_TRANSPORT_GROUPS. */
tagc_status tagc_comm_create_group(tagc_comm *parent, tagc_group_kind kind, int first, int stride, int n,
                                   tagc_comm **out);

#endif
