"""How many instances a macro-scheduler wants: said by a leader, taken over by the next, obeyed by one owner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serai.contracts.admission import GroupLease, ScaleWish
from serai.contracts.codec import decode, encode
from serai.contracts.launcher import LauncherState
from serai.contracts.placement import ActionKind
from serai.launcher.deployments import Deployment, wished_slots
from serai.macro_scheduler.leading import Candidate
from serai.macro_scheduler.membership import Membership, MembershipSettings
from serai.macro_scheduler.mitosis import Scale
from serai.macro_scheduler.owner_keys import OwnerKeys
from serai.macro_scheduler.scaling import Load, ScalingSettings
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.macro_scheduler.wishing import EVERY_S, Wishing
from serai.placer.demand import LengthSpread, ModelDemand
from serai.placer.scale_wishes import ScaleWishes, as_wished
from serai.runtime.bus import BusError, Message
from unit.fakes import FakeBus
from unit.test_launcher_lease import Keys
from unit.test_launcher_service import CHAT, Shell
from unit.test_placer_service import Site

SCALING = ScalingSettings(start_s=60.0, instances_max=8)
BUSY = Load(slo_ttft_s=5.0, instances=2, requests=100, ttft_slow_share=0.5, utilisation=0.95)


def wish(instances: int = 3, **fields: object) -> ScaleWish:
    return ScaleWish("m", instances, **{"owner": "placer", "epoch": 2, "holds_s": 30.0} | fields)  # type: ignore[arg-type]


def members(*sessions: str) -> Membership:
    made = Membership(MembershipSettings(scaling=SCALING, drains=False), "me-1")
    for session in sessions:
        made.joined(session, 0.0)
    return made


# -- the leader --------------------------------------------------------------------------------------------------------


def test_what_is_wanted_is_told_at_once_and_again_until_it_changes() -> None:
    bus = FakeBus()
    wishing = Wishing(bus, "alps", "m", 4, "placer", 1)
    group = members("a", "b")
    (scale,) = [one for one in group.evaluate(BUSY, {}, 10.0) if isinstance(one, Scale)]
    wishing.scaled(group, scale.change, scale.why)
    wishing.look(lambda: True, 10.0)
    wishing.look(lambda: True, 10.0 + EVERY_S / 2)
    wishing.look(lambda: True, 10.0 + EVERY_S)
    told = [decode(ScaleWish, one.payload) for one in bus.take() if one.subject == "macro.wish.alps"]
    assert [(one.instances, one.owner, one.epoch) for one in told] == [(3, "placer", 4)] * 2
    assert "utilised" in told[0].why
    group.joined("c", 11.0)
    wishing.scaled(group, -1, "calm")
    assert wishing.wanted == 2


def test_a_leader_without_its_lease_wishes_for_nothing_and_a_bus_that_is_away_is_no_harm() -> None:
    bus = FakeBus()
    wishing = Wishing(bus, "alps", "m", 4, "placer", 1)
    wishing.look(lambda: False, 0.0)
    assert bus.take() == []
    bus.publish = _away  # type: ignore[method-assign]
    wishing.look(lambda: True, 0.0)


def _away(*_: object, **__: object) -> None:
    raise BusError("away")


def test_nobody_is_told_where_nobody_acts() -> None:
    bus = FakeBus()
    Wishing(bus, "alps", "m", 4, "none", 1).look(lambda: True, 0.0)
    assert bus.take() == []


def test_the_next_leader_asks_for_nothing_that_starts_already() -> None:
    group = members("a", "b")
    group.resumed(3, 100.0)
    assert group.starting == 1
    assert group.evaluate(replace(BUSY, starting=group.starting), {}, 105.0) == []
    assert group.evaluate(replace(BUSY, starting=0), {}, 161.0) != []


def test_without_a_leader_before_it_begins_at_once() -> None:
    group = members("a", "b")
    group.resumed(0, 100.0)
    assert group.evaluate(BUSY, {}, 105.0) != []


def test_settings_name_one_owner() -> None:
    assert MacroSchedulerSettings(scaling=True, scaling_by="placer").group("me").drains is False
    assert MacroSchedulerSettings(scaling=True).group("me").drains is True
    with pytest.raises(ValueError, match="--scaling-by 'both': must be one of none, placer, launcher"):
        MacroSchedulerSettings(scaling=True, scaling_by="both")
    with pytest.raises(ValueError, match="needs --scaling"):
        MacroSchedulerSettings(scaling_by="launcher")


# -- the placer --------------------------------------------------------------------------------------------------------


def test_a_wish_holds_until_it_is_over_or_another_is_said() -> None:
    heard = ScaleWishes()
    assert heard.hear(wish(3), {"m"}, 0.0) == ""
    assert heard.wanted(29.0) == {"m": 3}
    assert heard.hear(wish(2), {"m"}, 29.0) == ""
    assert heard.wanted(58.0) == {"m": 2}
    assert heard.wanted(59.1) == {}


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (wish(owner="launcher"), "for the launcher"),
        (wish(-1), "wants -1 instances"),
        (wish(20_000), "wants 20000 instances"),
        (wish(holds_s=0.0), "for 0 s"),
        (ScaleWish("other", 1, "placer", 1, 30.0), "no model 'other'"),
    ],
)
def test_a_wish_that_is_for_others_or_cannot_be_is_not_obeyed(refused: ScaleWish, why: str) -> None:
    heard = ScaleWishes()
    assert why in heard.hear(refused, {"m"}, 0.0)
    assert heard.wanted(0.0) == {}


def test_a_deposed_leader_is_not_obeyed_while_the_new_one_speaks() -> None:
    heard = ScaleWishes()
    heard.hear(wish(3, epoch=5), {"m"}, 0.0)
    assert "epoch 4" in heard.hear(wish(7, epoch=4), {"m"}, 1.0)
    assert heard.wanted(1.0) == {"m": 3}
    assert heard.hear(wish(7, epoch=4), {"m"}, 31.0) == "", "a group whose leases were lost counts anew"


def test_a_wish_weighs_as_what_so_many_instances_serve() -> None:
    length = LengthSpread.about(100)
    demand = ModelDemand("m", 1.0, length, length, requests_s_high=1.5)
    assert as_wished(demand, None, 2.0) == demand
    raised = as_wished(demand, 3, 2.0)
    assert (raised.requests_s, raised.requests_s_high, raised.max_replicas) == (5.0, 5.0, 3)
    assert as_wished(replace(demand, requests_s_high=9.0), 3, 2.0).requests_s_high == 9.0
    assert as_wished(demand, 1, 2.0).max_replicas == 1


def test_a_wish_keeps_within_what_the_file_says() -> None:
    length = LengthSpread.about(100)
    demand = ModelDemand("m", 1.0, length, length, min_replicas=2, max_replicas=4)
    assert [as_wished(demand, count, 2.0).max_replicas for count in (0, 1, 3, 9)] == [2, 2, 3, 4]


def test_those_that_are_of_no_pool_count() -> None:
    length = LengthSpread.about(100)
    raised = as_wished(ModelDemand("m", 1.0, length, length), 5, 2.0, elsewhere=2)
    assert (raised.requests_s, raised.max_replicas) == (9.0, 3), "two of the five are there, and bear their part"


def test_a_placer_gives_a_model_as_many_engines_as_its_macro_scheduler_wants_and_takes_them_back(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, "automatic", pools=4)

    def engines() -> int:
        return sum(pool.models.count("a") for pool in site.pools)

    async def wanted(instances: int) -> int:
        payload = encode(ScaleWish("a", instances, "placer", 2, 30.0, "utilised 1.2 > 0.9"))
        site.placer.wants.on_wish(Message("macro.wish.local", payload))
        await site.look(times=6)
        return engines()

    async def main() -> None:
        await site.look(times=3)
        assert engines() == 1
        assert await wanted(3) == 3
        text = "\n".join(site.explain("a").models[0].text)
        assert "Its macro-scheduler wants 3 engines in all" in text
        assert await wanted(1) == 1
        stops = [action for action in site.explain().plan.actions if action.kind is ActionKind.STOP]  # type: ignore[union-attr]
        assert all("no more" in action.why for action in stops)

    asyncio.run(main())


# -- the launcher ------------------------------------------------------------------------------------------------------


def test_a_launcher_scales_the_deployment_that_may_be_scaled() -> None:
    fixed, scaled = (
        Deployment(name="fixed", model="m", count=2),
        Deployment(name="more", model="m", count=1, scale_to=4),
    )
    given = {"fixed": 2, "more": 1}
    assert wished_slots([fixed, scaled], 4, given) == ("more", 2)
    assert wished_slots([fixed, scaled], 9, given) == ("more", 4)
    assert wished_slots([fixed, scaled], 0, given) == ("more", 1), "never below the site file's count"
    assert wished_slots([fixed], 4, given) is None


def test_a_launcher_obeys_wishes_that_are_for_it_while_it_acts(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.launcher.scaled.now["chat"] = replace(CHAT, scale_to=3)

    def heard(**fields: object) -> int:
        payload = encode(wish(**fields))  # type: ignore[arg-type]
        shell.launcher.answers.on_wish(Message("macro.wish.local", payload))
        return shell.launcher.scaled.now["chat"].count

    assert heard(instances=2) == 1, "it is for the placer"
    assert heard(instances=2, owner="launcher") == 2
    assert heard(instances=9, owner="launcher") == 3
    assert heard(instances=0, owner="launcher") == 1
    shell.launcher.answers.on_wish(Message("macro.wish.local", b"{"))
    asyncio.run(shell.launcher.lease.give_back(LauncherState()))
    assert heard(instances=3, owner="launcher") == 1, "another launcher acts"


# -- the lease ---------------------------------------------------------------------------------------------------------


def test_what_is_wanted_goes_along_in_the_leaders_lease() -> None:
    async def main() -> None:
        keys = Keys()
        first, second = (candidate(name, keys) for name in ("one", "two"))
        await first._step()
        assert first.term is not None
        assert first.term.wishing is not None
        first.term.wishing.wanted = 4
        await first._step()
        assert keys.value is not None
        assert decode(GroupLease, keys.value).wanted == 4
        await first._resign()
        await second._step()
        assert second.term is not None
        assert second.term.wishing is not None
        assert second.term.wishing.wanted == 4
        await second._resign()

    asyncio.run(main())


def candidate(name: str, keys: Keys) -> Candidate:
    settings = MacroSchedulerSettings(scaling=True, scaling_by="placer", lease_s=5.0)
    owners = OwnerKeys(Keys())
    return Candidate(
        "m", settings, FakeBus(), keys, owners, name, lambda _: [], lambda _: set(), lambda _: 0, "unheard"
    )
