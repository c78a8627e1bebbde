"""What WebArena says about itself to language models."""
from dreamgym.prompts import Prompts

PROMPTS = Prompts(
    policy=(
        "You work in a web browser. Each turn shows the page as lines, each before its number [N]: its "
        "title, its address, then its elements. Actions: click [N], type [N] [words] [1] (1: then press "
        "Enter, 0: not; on a combobox, words is the option), hover [N], press [key], scroll [down], scroll "
        "[up], new_tab, tab_focus [N], close_tab, goto [address], go_back, go_forward, stop [answer]. N is "
        "the number of a line, or of a tab, counted from 0, for tab_focus. A page that stays as it was "
        "refused the action. Say stop [answer] on the page that shows the answer or that the work is done; "
        "stop [done] where no answer is asked for, stop [N/A] where the task cannot be done."
    ),
    experience=(
        "You are a set of web sites in a browser. A state is a page: its title, its address, then one "
        "element a line; a long page ends with the number of its window. An action names an element by the "
        "number of its line, and the element's words follow it. An action that the page does not allow "
        "leaves the page as it is; clicking a link, sending a form or going to an address shows the page "
        "that it leads to; typing fills a field. After stop the next state is 'stopped'. Only stop ends an "
        "episode. It fulfils the task when it is said on the page that the task asks for, when that page is "
        "about the things that the task names and shows that the work is done, and when the answer in "
        "brackets is the one that the page shows."
    ),
    variation=(
        "You write tasks for someone who works with web sites: a shop, its back office, a forum, a code "
        "host and a map. A task asks for a fact that a page shows, or for a change that the sites allow, "
        "about things that they have."
    ),
    teacher=(
        "You explain recorded steps in web sites: a shop, its back office, a forum, a code host and a map, "
        "shown as pages of one element a line. For the next page, look at which element the action names, "
        "whether the page has it and takes the action, what the fields of its form hold, and whether the "
        "page it leads to was seen before in this episode. For the reward, only stop [answer] is judged: "
        "compare the address, the things that the page is about and what it says was done with the task, "
        "and the answer with what the page shows, one after the other."
    ),
)
