"""The training of a swarm's worker: the loop of loop.py, with shards, validation and peers that follow the members."""

from diloco.outer.elastic import ElasticLoop
from diloco.training.batches import WorkerTexts
from diloco.training.loop import Training
from diloco.training.swarm.peers import SwarmPeers, starting_shards
from diloco.training.swarm.validation import SwarmValidation


class SwarmTraining(Training):
    """A worker among others that come and go, from its first parameters to its last event."""

    validation: SwarmValidation

    def _starting_shards(self, texts: WorkerTexts) -> list[int]:
        return starting_shards(texts, self.engine, self.config)

    def _validation(self) -> SwarmValidation:
        return SwarmValidation(
            self.config,
            self.evaluator,
            self._elastic_loop(),
            self.events,
            leader=self._writes_model,  # all its ranks measure together
            stopped=lambda: self.engine.ranks.any(self.stop_requested),
        )

    def _peers(self, texts: WorkerTexts) -> SwarmPeers:
        return SwarmPeers(
            self.config, texts, self.engine, self.reader, self.validation, self._elastic_loop(), self.events
        )

    def _elastic_loop(self) -> ElasticLoop:
        loop = self.mode.averager
        assert isinstance(loop, ElasticLoop), "the engine is elastic, and RunConfig refuses a swarm in another mode"
        return loop
