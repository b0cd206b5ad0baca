"""Students are stored as they were taught."""

import torch

from builder.students.team import StudentTeam
from testing.random_store import TOY


def test_the_stored_heads_of_each_number_of_students_add_up_to_what_their_classifier_says():
    team = StudentTeam(TOY, depth=1, rank=2, labels=3, dtype="fp16")
    team.mean, team.spread = 5.0, 2.0  # of values
    for _ in range(3):
        team.add()
    with torch.no_grad():
        for part in team.parameters():
            part.copy_(torch.randn_like(part).half())
        hidden = torch.randn(4, TOY.hidden)
        said = team.read(team.joined(torch.stack([member.read(hidden) for member in team.members])))
    stored = torch.stack([hidden @ head["weight"].float().T + head["bias"] for _, (_, head) in team.knowledge()]).cumsum(0)
    assert stored.shape == said.shape == (3, 4, 3)
    torch.testing.assert_close(stored, said, rtol=1e-2, atol=0.01 * float(said.std()))
