"""A fault of torch that may end a job under torchrun once nodes join or workers are started again, and the remedy.

Since torch shares one TCP store between the rendezvous and the workers, two things go wrong (torch 2.13):

- A torchrun keeps that store's address from its first round. When a node joins, those that were there before publish no
  address for the new round; the newcomer waits for one until its time is over, and the whole job fails. Seen under
  `c10d` and `etcd-v2`, as of `dynamic_rendezvous.py`.
- Workers that are started again read in it where the others were before, unless those have been faster: Gloo's
  connections are refused, in that start and in each one after it. One kill of three ended a job of two so, none of six
  with the variable; `_create_c10d_store` of `rendezvous.py` counts on a new store for every start.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment makes each round have a store of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def remedy(environment: Mapping[str, str] = os.environ) -> str:
    """Return the advice to set the variable; '' if it is set, or no worker may be started again."""
    nodes = environment.get("PET_NNODES", "1").split(":")
    is_elastic = nodes[0] != nodes[-1] or environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_elastic:
        return ""
    return (
        "a node that joins this job later would end it, and workers that are started again may not find each other, by "
        f"a fault of torch; set {VARIABLE}=1 where torchrun is started"
    )
