"""A launcher's plan, for people. Pure."""

from __future__ import annotations

from serai.contracts.launcher import LauncherWord, SlotWord


def word_text(word: LauncherWord) -> str:
    """A few lines for each slot."""
    does = "acts" if word.acting else f"does not act: {word.blind or 'it only says what it would do'}"
    return "\n".join([f"site {word.site}: launcher {word.holder} {does}", *[_slot(slot) for slot in word.slots]])


def _slot(slot: SlotWord) -> str:
    alert = " (somebody has to look at it)" if slot.alert else ""
    lines = [f"{slot.slot}: {slot.verdict}{alert}", f"  why   {slot.text}"]
    lines += [f"  job   {job}" for job in slot.jobs]
    if slot.facts:
        facts = [f"{name.removesuffix('_s')} {value:g} s" for name, value in slot.facts.items()]
        lines.append(f"  with  {', '.join(facts)}")
    return "\n".join(lines)
