"""The events of a swarm's network are in the log of its worker, in the order in which they came."""

import threading
from pathlib import Path

from diloco.history.events import Event, MemberJoinedEvent, MemberLeftEvent
from diloco.history.log import EventLog
from diloco.training.processes.swarm_worker import SwarmEvents


class Interrupted(EventLog):
    """A log during whose first line another thread has the next event."""

    def __init__(self, folder: Path, events: SwarmEvents) -> None:
        super().__init__(folder, 0)
        self.order: list[type[Event]] = []
        self.thread = threading.Thread(target=lambda: events("member_left", {"number": 1, "peer": "p"}))

    def emit(self, event: Event) -> None:
        if not self.order and not self.thread.is_alive():
            self.thread.start()
            self.thread.join(0.3)  # it ends within that if nothing holds it back
        self.order.append(type(event))


def test_a_member_that_leaves_while_the_first_events_are_written_has_joined_before(tmp_path: Path) -> None:
    events = SwarmEvents()
    events("member_joined", {"number": 1, "peer": "p"})
    log = Interrupted(tmp_path, events)
    events.write_into(log)
    log.thread.join(60)
    log.close()
    assert log.order == [MemberJoinedEvent, MemberLeftEvent]
