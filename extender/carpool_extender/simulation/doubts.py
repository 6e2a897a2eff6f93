"""What is doubtful about the experiments; the last words of their document."""

DOUBTS = (
    "The length of the transformers' samples on RAD-RM is not published: predictions are for 512 tokens, the most "
    "that BERT takes, and AdamW.",
    "Slowdown by MPS is carried over from pairs that were measured by time slicing, three tenants were measured by "
    "nobody, and both decide how much sharing pays. Gains on RAD-RM are larger for everybody here than published: "
    "read them against each other.",
    "RAD-RM's SM activity is assumed. What its GPUs draw is fitted to the published energies of three other policies, "
    "because nothing else is published of that machine: 63 W and 254 W. With the 50 W that are usual of an idle A100 "
    "and the 275 W that were assumed before, all policies saved less than published (MAGM 10.5% for 13.3%), and "
    "Carpool 12.1%, less than its goal: that goal is met by the fit. It is met with what Zeus measured on four other "
    "kinds of GPUs, too, whatever the limit is (23% of it without activity, 84% with all of it): 16.8%. What tells is "
    "the difference to MAGM in the same table.",
    "Except on RAD-RM power is by the idle power and the limit of each product, which the energy policy goes by, too, "
    "so that it is never wrong about power here. And a GPU that has a job draws no more without activity than asleep, "
    "where Zeus' trainings drew 23% of the limit: energies of HotCloud and Philly are told too low, and what sharing "
    "saves is told too small.",
    "Utilization counts what jobs alone keep busy over their slowdown. Of Lucid's 676 pairs, whose joint utilization "
    "was measured, that is 5 points more than `nvidia-smi` showed (6 of those on CIFAR-10, as HotCloud's jobs are), so "
    "that everybody who shares has a little less utilization than the tables say; makespans are not touched.",
    "HotCloud's jobs stand for 18 measured profiles only; their order is drawn, and nobody knows durations.",
    "What keeps Carpool from its goals on HotCloud is the third tenant: while jobs wait a GPU has 2.2 of them, and 2.7 "
    "where true memory is known (first three seeds). Three jobs of 2.2 to 2.6 GiB fit into 8 GiB, and do not with a "
    "tenth more for each. That tenth is not given up: of Lucid's 676 pairs one in ten took over a tenth more memory "
    "together than both had taken alone, though half of them differed by less than half a percent.",
    "Blind policies see a newcomer's whole memory as soon as their monitor does; real jobs grow.",
    "Several choices (how a job that died is tried again, which limits are shown, that a running job's own peak counts "
    "in two steps) were made after seeing results on these seeds. The only deaths that a first run's factor ever "
    "prevented here were of one kind of job, 2% above the bound of an earlier memory model: that nobody dies is "
    "evidence for one kind of job on one GPU product, and for no factor.",
    "Jobs of one kind take exactly the same memory here each time, so that what was learned of a kind is always "
    "right for the next one; real runs differ, for which the bound leaves a tenth. How many jobs are of a kind that "
    "ran before decides what learning brings: on HotCloud there are 18 kinds, on RAD-RM 35.",
    "A peak is measured without error, and none grows after its first minute. So no running job ever takes more than "
    "it is counted with once it was measured, by construction: how often that happens in reality, and what it costs "
    "the job or its neighbours, is not in these tables. Nor is whether real jobs show their peak in the first minute "
    "and a half; those that only load their data meanwhile do not count as still (they keep no GPU busy), and here "
    "every job works at once.",
    "RAD-RM's SM activity is assumed to be the same for all batch sizes of a model on ImageNet or text, so that "
    "what one size shows is exactly right for the others by construction: what learning from other sizes brings "
    "there, and what true activity is worth beside it, is the simulator's own assumption. On HotCloud, where "
    "activity was measured, knowing it made the makespan 1% longer, which is chance.",
    "What a change of a mode costs was measured nowhere: the node agent prepares a simulated GPU in a tenth of a "
    "second, and how long real MPS daemons take to start is not known here. Nobody waits for others to leave, "
    "because a mode changes only while a GPU is idle.",
    "MIG is not simulated: nobody measured how its instances slow each other down, so that the simulator would have "
    "no truth for it, and neither experiment used it.",
    "HotCloud with failures shows how little a mean over ten seeds tells where GPUs fail: an earlier version took "
    "248.4 ± 48.4 minutes, the next 287.2 ± 80.5, and the one that counts running jobs with their own peaks 248.7 ± "
    "55.3, on the same workloads and failures; the last difference is 38.5 minutes with a standard error of 18.0, half "
    "of it one seed. Whichever long job is killed late begins again and is the last to end.",
    "On Alibaba's pods and on Philly's jobs nothing is learned, because no job of theirs says what it trains; on "
    "Alibaba's pods nothing is measured, either: what they declare is taken for the truth. Their lines of Carpool "
    "are the default's decisions without what it learns.",
    "Where other assumptions were not tried for an experiment, the table that tells of them is missing.",
)
