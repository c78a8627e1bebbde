"""What states mean together with actions: grounding, kinds of actions, and the audit that only reports
use."""
import pytest

from dreamgym.envs.webarena.audit import WebArenaAudit
from dreamgym.envs.webarena.page import Node, abstract
from dreamgym.envs.webarena.text import action_type, bare, ground, read_action
from dreamgym.episode import Step, Task

PAGE = """page: Cart
url: shopping/cart
link 'Home'
textbox 'Quantity' value '1'
combobox 'Sort' value 'Name' options 'Name' | 'Stars'
text 'Cart is empty.'"""
AUDIT = WebArenaAudit()


@pytest.mark.parametrize("action, grounded", [
    ("click [3]", "click [3] link 'Home'"), ("type [4] [3]", "type [4] [3] [1] textbox 'Quantity'"),
    ("type [5] [Stars] [0]", "type [5] [Stars] [0] combobox 'Sort'"), ("hover [6]", "hover [6] text 'Cart is empty.'"),
    ("click [1]", "click [1]"),                              # a header line
    ("click [9]", "click [9]"), ("go_back", "go_back"), ("stop [empty]", "stop [empty] text 'Cart is empty.'"),
    ("stop [art]", "stop [art]"),                            # no whole word of the page
    ("stop [done]", "stop [done]"), ("stop []", "stop []"), ("stop [click [3]]", "stop [click [3]]"),
    ("I would\nlike to shop", "I would like to shop")])
def test_grounding(action, grounded):
    """A grounded action that names another line, that spans lines."""
    assert ground(PAGE, action) == grounded == ground(PAGE, grounded)
    assert ground("no page", action) == bare(grounded)


def test_names_with_marks_ground_and_read_back():
    nodes = [Node("link", "it's 5"), Node("link", "see [1] here"), Node("text", "a] link")]
    state = abstract("T", "shopping", nodes).text
    for number, node in enumerate(nodes, 3):
        for action in (f"click [{number}]", f"type [{number}] [x] [0]"):
            grounded = ground(state, action)
            assert grounded == f"{action} {node.role} '{node.name}'" and bare(grounded) == action
            assert read_action(state, grounded) == read_action(state, action)


@pytest.mark.parametrize("action, kind", [
    ("click [3]", "link"), ("click [6]", "refused"), ("click [9]", "refused"), ("click [2]", "refused"),
    ("type [4] [3] [0]", "fill"), ("type [4] [3] [1]", "search"), ("type [5] [Stars] [0]", "choose"),
    ("type [5] [Price] [1]", "refused"), ("type [3] [x] [1]", "refused"), ("scroll [down]", "refused"),
    ("close_tab", "refused"), ("new_tab", "tab"), ("tab_focus [0]", "tab"), ("tab_focus [1]", "refused"),
    ("go_back", "back"), ("goto [map]", "goto"), ("stop [done]", "stop"), ("buy it", "refused")])
def test_action_types(action, kind):
    """Stops tables from counting the raw and the grounded form of an action as different kinds."""
    assert AUDIT.action_type(PAGE, action) == kind == action_type(PAGE, ground(PAGE, action))


def test_the_audit_judges_stop_alone():
    """A verdict where no rule can tell, and one of our rules on a task of the official data."""
    task, other = Task(id="t", text="Subscribe to the forum music."), Task(id="t", text="Buy me a pony")
    forum = "page: music\nurl: reddit/f/music\nheading 'music'\nbutton '{}'"
    assert AUDIT.success(task, forum.format("Unsubscribe"), "stop [done]", "stopped") is True
    assert AUDIT.success(task, forum.format("Subscribe"), "stop [done]", "stopped") is False
    for audit, t, action in (
        (AUDIT, task, "click [3]"), (AUDIT, other, "stop [done]"),
        (WebArenaAudit(False), task, "stop [done]")):
        assert audit.success(t, forum.format("Unsubscribe"), action, "stopped") is None


def test_inconsistencies():
    def count(*rows):
        return AUDIT.inconsistencies([Step(state=s, action=a, next_state=n) for s, a, n in rows])

    home = PAGE.replace("empty", "full").replace("shopping/cart", "shopping")
    changed = PAGE.replace("empty", "full")
    # a message
    assert count((home, "click [3]", PAGE), (PAGE, "click [3]", home), (home, "click [3]", changed))[1] == 0
    one, two, home = (PAGE.replace("Cart is empty.", words) for words in ("total $1", "total $2", "Hello"))
    home = home.replace("shopping/cart", "shopping")
    assert count((home, "click [3]", one), (one, "click [3]", home), (home, "click [3]", two)) == (1, 1)
    assert count((home, "click [3]", one), (one, "type [4] [3] [1]", two)) == (0, 0)
