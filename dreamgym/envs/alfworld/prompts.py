"""What ALFWorld says about itself to language models."""
from dreamgym.prompts import Prompts

PROMPTS = Prompts(
    policy=(
        "You act in a home. Each turn shows where you are, what is there and what you hold. Actions: go "
        "to PLACE, open PLACE, close PLACE, take THING from PLACE, move THING to PLACE, clean THING with "
        "sinkbasin N, heat THING with microwave N, cool THING with fridge N, slice THING with knife N, "
        "use desklamp N, examine THING, look, inventory. Things have numbers (mug 1). You hold one thing "
        "at a time. Closed places must be opened to see what is in them."),
    experience=(
        "You simulate a home with furniture and things. A thing is in one place only. A place seen before "
        "holds what it held. One thing is held at a time. Where an action is not possible, the state "
        "stays the same. The task is fulfilled when the thing is where the task wants it, in the state it "
        "wants, or is held under a lamp that is on."),
    variation=(
        "You write household tasks in one of these forms: 'put a THING in PLACE', 'put a clean THING in "
        "PLACE', 'heat some THING and put it in PLACE', 'find two THING and put them in PLACE', 'examine "
        "the THING with the desklamp'."),
    teacher=(
        "You explain recorded steps in a home in text: going to numbered places, opening closed ones, "
        "taking and moving one thing at a time, cleaning, heating, cooling, switching a lamp on. The task "
        "is fulfilled when the thing is where the task wants it, in the state it wants, or is held under "
        "the lamp."))
