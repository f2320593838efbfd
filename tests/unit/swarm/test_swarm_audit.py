"""What serves only against liars is behind the hooks of node/audit.py: honest workers need none of it."""

import subprocess
import sys

import pytest

from diloco.swarm.audit.auditor import Auditor
from diloco.swarm.node.audit import Audit
from diloco.swarm.simulator import schedules
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import MemorySwarm


def test_a_calm_swarm_counts_the_same_means_with_an_audit_and_without() -> None:
    async def story(swarm: MemorySwarm) -> list[list[bytes]]:
        workers = await founded(swarm, 4)
        await rounds(workers, 3)
        return [worker.trainer.means for worker in workers]

    audited = told(story, audit=Auditor)
    assert told(story, audit=Audit) == audited == [audited[0]] * 4
    assert len(audited[0]) == 3


def test_a_worker_fetches_the_state_without_an_audit() -> None:
    async def story(swarm: MemorySwarm) -> list[list[bytes]]:
        workers = await founded(swarm, 3)
        await rounds(workers, 2)
        late = await swarm.start()
        await late.catch_up()
        await rounds(workers, 1)
        return [worker.trainer.means for worker in workers]

    means = told(story, audit=Audit)
    assert means == [means[0]] * 4 and len(means[0]) == 3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_honest_workers_without_an_audit_come_through_faults_with_one_mean_a_round(seed: int) -> None:
    assert schedules.run(seed, audit=Audit).problems() == []


def test_a_node_needs_no_module_of_the_audit() -> None:
    loaded = "import sys, diloco.swarm.node.node; print([name for name in sys.modules if 'swarm.audit' in name])"
    run = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
