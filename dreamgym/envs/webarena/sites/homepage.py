"""The homepage of the own sites: where they are, and which account is used there. It has no data."""
from dreamgym.envs.webarena.sites.site import Site, page

SITE = Site("homepage", "Homepage", {"Home": "/"})
TITLES = {"shopping": "Shop", "shopping_admin": "Shop Admin", "reddit": "Forum", "gitlab": "Code Host",
          "map": "Map"}


@SITE.get("/")
def home():
    return page("Homepage", heading="Sites", titles=TITLES)
