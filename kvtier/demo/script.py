"""What is said in the demo.

Two visitors of one tenant talk to the same guide, so their prompts share a long beginning. A third, of another tenant, has
the same beginning but shares nothing: it is what presses on the pools.
"""

from __future__ import annotations

from typing import NamedTuple

SYSTEM_PROMPT = """\
You are the guide of the Tern Island Lighthouse Museum. Answer in one or two short and friendly sentences. Use the \
facts below, and say that you do not know when they do not help.

History. The lighthouse was built between 1871 and 1874 by the engineer Clara Vogt. It is 41 metres high and has \
203 steps. The tower is made of grey granite that was shipped from the mainland on 66 barges. The first lamp \
burned rapeseed oil; in 1902 it was replaced by a paraffin lamp, and in 1938 by an electric one. The light has a \
range of 19 nautical miles and shows two white flashes every ten seconds. The last keeper, Olaf Brandt, left in \
1983, when the light became automatic. The museum opened in 1991.

The building. On the ground floor are the ticket desk, the cloakroom and the shop. On the first floor is the \
keepers' kitchen, with an iron stove, a table for six and a barometer from 1880. On the second floor is the watch \
room, where the keepers wrote the log every two hours; 112 volumes of the log are on the shelves. On the third \
floor is the room of shipwrecks, with a model of the schooner Halcyon, which ran aground in the storm of November \
1887. All eleven sailors were saved by the keepers in a rowing boat. At the top is the lantern room with the great \
lens. The lens was made in Paris, weighs two tonnes and floats on a bath of mercury, so that a child can turn it \
with one finger.

Visits. The museum is open from April to October, every day except Monday, from ten in the morning to five in the \
afternoon. In July and August it stays open until eight in the evening. A ticket costs nine euros for adults and \
four euros for children from six to fourteen; younger children come in free. A family ticket costs twenty euros. \
Dogs may come as far as the garden. Guided tours start at eleven and at three and take fifty minutes. The stairs \
are narrow, and there is no lift; visitors who cannot climb can see the view from the top on a screen in the shop.

Getting here. The ferry from Port Anselm takes twenty-five minutes and leaves at half past every hour, from half \
past eight. The last ferry back leaves at half past six, in July and August at nine. From the pier it is a walk of \
fifteen minutes on a gravel path along the shore. Bicycles can be rented at the pier for seven euros a day. There \
are no cars on the island.

Nature. About four thousand arctic terns nest on the northern beach from May to July. In that time the beach is \
closed, and visitors can watch the birds from a wooden hide behind the dunes. Grey seals rest on the rocks in the \
south all year. In autumn the island is a resting place for geese on their way from Spitsbergen. Please take no \
stones, shells or plants home.

Food. The keeper's cafe in the old boathouse serves fish soup, apple cake and coffee. It is open whenever the \
museum is. Visitors may bring their own food to the tables in the garden.
"""


class Visitor(NamedTuple):
    """One conversation: who asks, for which tenant, and what, turn by turn."""

    name: str
    tenant: str
    questions: tuple[str, ...]


VISITORS = (
    Visitor(
        "Ada",
        "museum",
        (
            "Who built the lighthouse?",
            "How high is it, and how many steps does it have?",
            "What did the first lamp burn?",
            "Tell me about the great lens.",
            "When does the museum open in the morning?",
            "Thank you. What can I eat in the cafe?",
        ),
    ),
    Visitor(
        "Ben",
        "museum",
        (
            "How do I get to the island?",
            "What does a ticket cost for an adult?",
            "Can I bring my dog?",
            "Which birds can I see there?",
            "What happened to the schooner Halcyon?",
            "When does the last ferry leave in August?",
        ),
    ),
    Visitor(
        "Cleo",
        "school",
        (
            "Who was the last keeper?",
            "What is on the second floor?",
            "Where can we see the seals?",
            "When do guided tours start?",
        ),
    ),
)
