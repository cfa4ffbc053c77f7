"""From a site file to deployments with their batch scripts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serai.launcher.deployments import Deployment
from serai.launcher.site import STOP_S, Kept, Site
from serai.launcher.templates import script
from serai.runtime.fields import BadInput


def deployments_of(site: Site, counts: Mapping[str, int], now_s: float) -> list[Deployment]:
    """What the site file keeps served, with `counts` given by hand. A model profile that is no deployment can be given
    by hand, too. `now_s`: seconds since 1970, for excluded nodes. Raises BadInput."""
    kept: dict[str, Kept] = dict(site.deployments)
    for name, count in counts.items():
        if name not in kept and name not in site.models:
            known = ", ".join([*site.deployments, *site.models]) or "none"
            raise BadInput(f"--count {name}", "is no deployment and no model of the site file", f"it has {known}")
        kept[name] = replace(kept.get(name, Kept(profile=name)), count=count)
    if not kept:
        raise BadInput("deployments", "there are none", "write them into the site file, or give --count MODEL=N")
    return [_deployment(site, name, one, now_s) for name, one in sorted(kept.items())]


def _deployment(site: Site, name: str, kept: Kept, now_s: float) -> Deployment:
    asked = {} if kept.time_s is None else {"time_s": kept.time_s}
    plan = site.job(kept.profile, **asked)
    return Deployment(
        name=name,
        model=plan.model,
        count=kept.count,
        scale_to=kept.scale_to,
        time_limit_s=plan.time_s,
        queue_wait_s=kept.queue_wait_s,
        load_s=kept.load_s,
        load_s_max=kept.load_s_max,
        idle_s=kept.idle_s,
        leaves_s=plan.drain_s + STOP_S if kept.leaves_s is None else kept.leaves_s,
        script=script(site, plan, excluded=site.excluded(now_s)),
        excluded=tuple([one.node for one in site.excluded(now_s)]),
    )
