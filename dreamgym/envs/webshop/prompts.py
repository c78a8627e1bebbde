"""What WebShop says about itself to language models; dreamgym/prompts.py adds the forms of the answers."""
from dreamgym.prompts import Prompts

PROMPTS = Prompts(
    policy=(
        "You shop in a web store. Each turn shows the page. Actions: search[words] on the search page; "
        "click[N] opens product N of a results page; click[next >], click[< prev], click[back to search] "
        "move between pages; on an item page click[VALUE] chooses an option, click[description] and "
        "click[features] show details, click[buy now] ends the episode. Buy only a product that meets "
        "every wish of the task, with its options chosen; go back when an option is absent."
    ),
    experience=(
        "You are a web store. You are given a shopper's task, what happened so far, similar past "
        "transitions, and an action. The action may be impossible on this page; then the page stays as it "
        "is. Only click[buy now] on an item page ends the episode. The task is fulfilled only when the "
        "purchase meets every wish of it: the product, its options, and the price."
    ),
    variation=(
        "You write shopping tasks of the form 'find me WORDS with NAME: VALUE, and price lower than N "
        "dollars'."
    ),
    teacher=(
        "You explain recorded steps of an environment. The environment is a web store with a search page, "
        "pages of numbered results, item pages with options to choose, and 'buy now', which ends the "
        "episode; the purchase succeeds only when the product, every asked option and the price fit the "
        "task."
    ),
)
