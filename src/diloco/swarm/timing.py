"""All waiting times of the swarm, each with its reason. What is changed here holds everywhere.

A name ends in SECONDS, or in SHARE: that is a factor of `lost_seconds` (how long a silent peer counts as live),
`stall_seconds` (four times that), `beat_seconds`, `timeout_seconds` or `minority_seconds`, which each run sets
(settings.py). Limits of another kind (calls a second, sizes, counts) stand where they are kept.
"""

# Looking again

POLL_SECONDS = 0.25
"""A task that waits for a change of the members looks again at the latest after this."""
TICK_SECONDS = 0.2
"""Between two looks at all members: which is due a heartbeat, which is lost. A fifth of the usual beat."""
CHECK_SECONDS = 1.0
"""Between two checks of this worker's own place in the swarm, of revocations and of its addresses."""
NUMBERS_POLL_SECONDS = 0.1
"""Between two looks whether all contributors have told the numbers of their parts."""

# Members

FROZEN_SECONDS = 2.0
"""A tick that comes so late says that this process was frozen, and not that the others were silent."""
FORGET_SECONDS = 600.0
"""A peer that has left is forgotten after this; one that is silent is named to joiners no longer."""
REDIAL_DIVISOR = 10.0
"""A silent peer is called again after this part of the time that it has been silent."""
LONGEST_REDIAL_SECONDS = 300.0
"""A silent peer is called for ever, less and less often, and at the latest after this."""
HALF_SILENT_SHARE = 0.5
"""Times `lost_seconds`: the wait after half of the members have fallen silent at once; this machine may be cut off."""
MOST_SILENT_SHARE = 12.0
"""Times `lost_seconds`: the wait after more than half have. About a minute: then they are really lost."""
SECOND_CALLER_SHARE = 1.6
"""Times `beat_seconds`: when the peer with the higher name begins a heartbeat itself, having heard none."""
GOODBYE_SECONDS = 2.0
"""The longest that a worker which leaves waits for an answer to its goodbyes: its user waits as long."""
SAVE_SECONDS = 1.0
"""The longest that writing peers.json may take when a worker leaves."""
FAULT_TOLD_EVERY = 60.0
"""Between two events of the same fault: a peer may know how to cause it. The log has a line of each."""

# Joining

SEARCH_SECONDS = 60.0
"""How long a joiner looks for a member, and asks for a number: a restarted swarm needs some seconds."""
ADMISSION_SHARE = 3.0
"""Times `lost_seconds`, or SEARCH_SECONDS if that is longer: how long a joiner asks members that do not admit it
yet."""
FOUNDER_SEARCH_SECONDS = 6.0
"""How long a founder looks for members before it begins a new swarm."""
SEARCH_PAUSE_SECONDS = 0.5
"""Between two attempts to find a member."""
LOOK_SECONDS = 20.0
"""Between two looks for members that are not known, at first: a side of a split finds the other so."""
LOOK_GROWTH = 1.5
"""Each such pause is this many times as long as the one before, unless a member was found."""
LONGEST_LOOK_SECONDS = 300.0
"""Between two such looks at most."""

# A round, for its worker

ASK_AGAIN_SECONDS = 2.0
"""Then the leader is asked whether it still leads."""
MOST_BACK_OFF_SECONDS = 4.0
"""A worker whose header is refused asks again after at most this."""
COMMIT_SHARE = 0.2
"""Times `lost_seconds`: how long after the others' end this worker's own commit may still arrive."""
MINORITY_SHARE = 6.0
"""Times `lost_seconds`: how long a post waits for a majority before training goes on."""
ALONE_SHARE = 2.0
"""Times `lost_seconds`: how long a leader may say that it has ended a round, without a mean that counts here."""
PLAN_SHARE = 2.0
"""Times `lost_seconds`: how long a leader may take for a plan when all have posted, which is one inquiry."""
DENIED_SHARE = 2 * PLAN_SHARE
"""Times `lost_seconds`: how long a member that should lead may say that it does not. It may follow a leader that this
worker has passed over, and passes that over itself meanwhile."""
PLANS_SHARE = 3.0
"""Times as long as one plan may take, all plans of a leader for a round may: it makes a plan without the workers that
an attempt has found out, and could go on for ever."""
PASSED_OVER_SECONDS = 60.0
"""A leader that did not go on is passed over for this long, and twice as long each further time; the next member
leads."""
LONGEST_PASSED_OVER_SECONDS = 3600.0
"""The longest that a leader is passed over, unless it may lie: a member that would let the others wait in each round
costs them no more than one round in an hour."""
TWO_ENDS_SECONDS = 3600.0
"""The leaders of a round with two ends are passed over for this long, if none can be proved to lie."""

# A round, for its leader

LEAST_PATIENCE_SHARE = 0.2
"""Times `lost_seconds`: the shortest wait for the other half of the workers, however short rounds are."""
QUIET_SHARE = 0.6
"""Times `beat_seconds`: a missing worker that was silent for so long is asked at once whether it is still live."""
STEP_SHARE = 3.0
"""Times the inner step of the slowest missing worker: how long a round waits for workers that were told to post now."""
LONGEST_STEP_SHARE = 0.25
"""Times `timeout_seconds`: the upper bound of that wait, and of what a leader is allowed for it or for a transfer."""
LEAST_GRACE_SHARE = 0.6
"""Times `lost_seconds`: the lower bound of that wait, however short inner steps are."""

# The transfer of a round

TRANSFER_SHARE = 2.0
"""Times the last transfer of its slowest worker: how long the next one may take."""
MOST_TRANSFER_SHARE = 8.0
"""Times `lost_seconds`: the longest wait for a worker's next parts; it holds while its line is not known."""
LEAST_TRANSFER_SHARE = 2.0
"""Times `lost_seconds`, however short transfers are: a plan that is lost on its way arrives after one."""
ALIVE_SECONDS = 1.0
"""A reducer that waits for others sends an empty frame so often: it is there."""
MEAN_SHARE = 1.5
"""Times as long as a reducer waits for parts, the others wait for its mean: it names the late worker first."""
TROUBLE_SECONDS = 0.5
"""From the first report of a failed transfer until it is judged: a dead worker is found out in this time."""
BAD_PAIR_SECONDS = 60.0
"""Two workers exchange no parts for this long after a failed transfer, and twice as long each further time."""
LONGEST_BAD_SECONDS = 3600.0
"""The longest that two workers exchange no parts, or that a worker reduces nothing, after repeated failures."""
WITHHELD_SECONDS = 600.0
"""A worker that withheld its means reduces nothing for this long, and twice as long each further time."""

# The state

TURN_SHARE = 2.0
"""Times `lost_seconds`: how long a slow reader of the state keeps its place while others wait for one."""
IDLE_SHARE = 4.0
"""Times `stall_seconds`: a reader that asks for nothing for so long is not waited for with means."""
HEAD_SHARE = 4.0
"""Times `stall_seconds`: how long a source may take to begin: its trainer makes a snapshot first, or a file is
hashed."""
WITNESS_SHARE = 4.0
"""Times `stall_seconds`: how long members that compute the digest of a state, or are behind, are asked for it."""
NO_SOURCE_SHARE = 0.25
"""Times `stall_seconds` without a member that has the state: a worker that was in rounds then goes on with its own."""
NO_SOURCE_JOINER_SHARE = 4.0
"""The same for a joiner, which has no state of its own: it ends with an error."""
DISAGREEMENT_SHARE = 8.0
"""Times `stall_seconds` since a state was first refused that other members do not have: then a joiner ends with an
error, and a worker that was in rounds keeps its own state if only one member is left."""
SOURCE_SHARE = 0.5
"""Times `stall_seconds`: after so long without a piece of the state another source is asked beside this one."""
STATE_TOLD_EVERY = 1.0
"""Between two events that tell how much of a state has arrived."""
WITNESS_PAUSE_SECONDS = 1.0
"""Between two snapshots that are taken to tell their digest: each costs the trainer a copy."""
LOST_ROUNDS_TOLD_EVERY = 60.0
"""Between two events about the lost rounds of one member: any member can say so."""

# The check of a mean

CHECK_DELAY_SECONDS = 0.5
"""The longest pause between a round and its check: the outer step has the processor first."""
PART_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""The pauses between questions for a part: a line that loses messages for a while is no lie."""

# A guest, which joins or asks for the status

GUEST_CALL_SECONDS = 10.0
"""The longest wait for the answer of a member."""
GUEST_LATER_SECONDS = 2.0
"""The longest wait for the other members, once one has answered."""
GUEST_STALL_SECONDS = 30.0
"""A file that makes no progress for so long is asked of another member."""
GUEST_START_SECONDS = 60.0
"""The longest wait for its p2pd and the first member."""

# Between a trainer and its sidecar

ENGINE_START_SECONDS = 120.0
"""The longest start of a sidecar: it searches for a member, and asks for a number."""
FETCH_STATE_SECONDS = 6 * 3600.0
"""The longest that a large state may take over a slow line; the sidecar itself notices a stalled transfer."""
PROGRESS_SECONDS = 0.5
"""Between two reports of a trainer's progress to its sidecar."""
LAST_ROUND_SECONDS = 10.0
"""The longest wait for a round that is under way when the engine closes."""
DEADLINE_GRACE_SECONDS = 5.0
"""The time after a round's deadline in which the sidecar reports the failure itself."""
OUTCOME_POLL_SECONDS = 0.5
"""Between two looks whether the sidecar of a waiting round is still there."""
STATUS_SECONDS = 1.0
"""Between two reports of the run's status to the trainer."""
SNAPSHOT_SECONDS = 60.0
"""The longest wait for a trainer's snapshot, which it makes between two inner steps."""
SIDECAR_LEAVE_SECONDS = 2.5
"""The longest that a sidecar's goodbye to the members may take."""
SIDECAR_CLOSE_SECONDS = 1.5
"""The longest that the end of its network may take."""
SIDECAR_SILENT_TURNS = 30
"""A sidecar is frozen after this many seconds without a message, counted while the trainer itself runs."""
SIDECAR_FIRST_TURNS = 60
"""The same at its start: a process that is still importing sends nothing."""
RESTARTS_SECONDS = 600.0
"""Within this time a sidecar is restarted a few times and no more (`RESTARTS`)."""
RESTART_PAUSE_SECONDS = 1.0
"""The pause before the second restart; then three, seven and fifteen times as long. The first comes at once."""
SEND_SECONDS = 2.0
"""The longest that sending a message to the sidecar may take."""
LEAVE_SECONDS = 3.0
"""The longest wait for the sidecar to leave the swarm: a little longer than it takes itself."""
EXIT_SECONDS = 2.0
"""The time that its process has to end, before it is killed."""
THREAD_SECONDS = 5.0
"""The longest wait for the end of the thread that supervises it."""
DYING_SECONDS = 0.5
"""The longest wait for the exit code of a sidecar whose link has closed."""
WRITER_SECONDS = 1.0
"""The longest wait for the end of the thread that writes snapshots."""

# The network

PUNCH_SECONDS = 2.0
"""The longest that an attempt at hole punching may take."""
PUNCH_POLL_SECONDS = 0.02
"""Between two looks whether a direct connection is there."""
DIAL_BACK_SECONDS = 1.5
"""Enough for one lost packet. So long must the asking peer wait if its router drops what it does not know."""
PUNCH_RETRY_SECONDS = 0.05
"""Between two attempts to connect at the same moment as the other peer: it may begin a little later."""
REACHABLE_ASK_SECONDS = 5.0
"""The longest wait for a public peer to answer whether it reaches this machine, or for a relay's reservation."""
REACHABLE_CHECK_SECONDS = 2.0
"""Between two looks whether this machine has lost its relays, or still does not know if it can be reached."""
REACHABLE_FIRST_PAUSE = 5.0
"""The pause after an attempt that did not help, which doubles: each attempt restarts p2pd, or asks all peers."""
REACHABLE_LONGEST_PAUSE = 300.0
"""The longest such pause."""
RESERVATION_POLL_SECONDS = 0.05
"""Between two looks whether a relay has given a reservation."""
PEERS_CHANGED_SECONDS = 2.0
"""Between two writes of peers.json when a peer or an address in it is new."""
PEERS_UNCHANGED_SECONDS = 20.0
"""Between two writes of peers.json when only the times in it are new."""
RECONNECT_SECONDS = 3.0
"""The longest that making a broken connection again may take: the call that needs it has a limit of its own."""
DAEMON_ASK_SECONDS = 5.0
"""The longest wait for an answer of the local p2pd, also where p2pd asks a peer: to connect back, or its relay's
load."""
DAEMON_CLOSE_SECONDS = 1.0
"""The longest wait for the tasks of a closed control connection to p2pd."""
PACING_SHORT_SECONDS = 0.5
"""A stream's window grows while its bytes are acknowledged within this: the line's queue is short."""
PACING_LONG_SECONDS = 1.5
"""The window shrinks when they take longer: a heartbeat on the same line would wait as long behind them."""
LINGER_SECONDS = 20.0
"""A closed stream waits this long until its last bytes have arrived; p2pd would lose them."""
DAEMON_START_SECONDS = 20.0
"""The longest wait until p2pd listens."""
DAEMON_STOP_SECONDS = 2.0
"""The time that p2pd has to end, before it is killed."""
STALE_SOCKETS_SECONDS = 60.0
"""A folder of sockets that is older, without a process, is left over from a killed worker. One that is younger may
belong to a process that has not locked it yet."""
RELAY_PROBE_SECONDS = 3.0
"""The longest wait for a relay to say how many bytes it carries: our own p2pd's at its start, a peer's for the
doctor."""
BUSY_SECONDS = 1.0
"""A refusal of a peer that calls too often is sent after this: it may call again at once, and gets few so."""
STREAM_HEADER_SECONDS = 10.0
"""The longest wait for the first bytes of a stream that p2pd hands over, which name the peer that has opened it."""

# Invitations and the doctor

INVITED_LIVE_SECONDS = 60.0
"""A peer silent for so long before the latest news of any peer is left out of invitations."""
DOCTOR_SECONDS = 5.0
"""The longest wait for the answer to a question of the doctor."""
DOCTOR_MEASURE_SECONDS = 2.0
"""The longest that measuring a line's bandwidth may take."""
