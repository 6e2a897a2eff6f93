"""What is doubtful about the simulator; the last words of the experiments' document."""

OWN_TRACES, FAR_MORE = "own traces, whose jobs get measured profiles at random", "a quarter to half of them"
"""Where far more jobs were slowed than they accept, and how many."""
DOUBTS = {
    "Speed": (
        "The model of slowdowns that decides was judged on the very pairs that are the truth here. None of its numbers "
        "was fitted to them, but its form was chosen with them in sight: on other GPUs and jobs it may err more.",
        "The truth is of pairs by time slicing on one kind of GPU (Lucid's 676). Slowdown by MPS is carried over "
        "from them, with SM activity in the place of busy time; the pairs that were measured behind MPS (Gavel's 512, "
        "on three older GPUs, how busy they were worked out) lost far more, and stand above where what is assumed is "
        "otherwise. That three tenants add their losses was checked by nobody. Both decide how much sharing pays.",
        "Jobs meet on the GPU only. Processor cores, disk, PCIe and network of a node cost nothing, though RAD-RM's "
        "tasks wait for their input and two to three times as many of them would ask one machine for it. Gains on "
        "RAD-RM are larger for everybody here than published (LUG took 28% less time there): read them against each "
        "other.",
        "A job is the same from its first second to its last: no phases, no evaluation, no checkpoints, and whoever "
        "dies or is killed begins again. Its speed changes at once when a neighbour comes or leaves.",
        "Nothing takes time but jobs: decisions, pulling images and starting containers take none, and a change of a "
        "mode none where no line says otherwise. What a change costs was measured nowhere: the node agent prepares a "
        "simulated GPU in a tenth of a second, and how long real MPS daemons take to start is not known here.",
        "MIG is not simulated: nobody measured how its instances slow each other down, so that the simulator would "
        "have no truth for it, and neither experiment used it.",
    ),
    "Utilization": (
        "Utilization is the share of time in which some kernel runs, as `nvidia-smi` shows it, and of Lucid's pairs "
        "as it was measured. Of others (all by MPS, all of three) it is composed: a GPU rests where all of its tenants "
        "rest, each as it would alone, and is no busier than with the work that is done. Of the 676 pairs, none of "
        "which the rule was fitted to, that is 0.4 points too high and 4.9 off in the mean, of those on CIFAR-10 1.3 "
        "too low and 3.2 off; the rule before, work alone, was 5.5 and 6.1 too high. Three were measured by nobody, "
        "nor was any tenant of MPS.",
        "So a GPU can do more work and be busy for less of the time, and utilization tells less of what is gained "
        "than makespan does. HotCloud's own table has it the other way round: a makespan 33.6% shorter is 50.6% more "
        "work in the same time, and its utilization rose by 61.5%. There, kernels that met ran longer than alone "
        "by more than they overlapped; Lucid's did not. Which of the two holds on a cluster depends on its jobs.",
        "Of a tenant that is slowed agents report less activity, but as much memory bandwidth as alone. Lucid's pairs "
        "say that bandwidth falls with speed, too: what their jobs use alone over their slowdowns adds up to 0.5 "
        "points more than was measured of both, and without the slowdowns to 5.1. Decisions may think neighbours worse "
        "than they are.",
        "SM activity of HotCloud's jobs is taken to be their GPU utilization, of RAD-RM's it is assumed. What tenants "
        "of MPS do adds up; by time slicing the time that is busy counts, as no two kernels run at once.",
    ),
    "Power": (
        "GPUs draw by Zeus' trainings: a line from what a GPU with a job draws (16 to 28% of its limit on four kinds "
        "of GPUs) to what the most demanding network took (67 to 93%). How busy those GPUs were was not measured: "
        "throughput over the largest of the same network stands for it. Idle power of GPUs without a job is the "
        "datasheet's; processors, memory and fans of nodes are not in any figure.",
        "HotCloud's and Philly's GPUs draw as an A40 does, which has an RTX 3090's chip, other memory and a lower "
        "limit. The policy `energy` goes by the other three GPUs of Zeus, so that it is wrong about power by what GPUs "
        "differ, but not about the shape: that power grows with SM activity as a line does is the same assumption in "
        "both. Watts while tenants share were measured by nobody.",
        "What RAD-RM's GPUs draw is fitted to the energies that were published of three other policies on that very "
        "machine, because they are the only measurement of it; the fit cannot tell a GPU that sleeps from one whose "
        "job does nothing. Its table above says what Zeus' shares and datasheets would give instead: by the 50 W that "
        "are usual of an idle A100 and limits of 275 W or more all policies would save less than published, and "
        "Carpool less than its goal. What tells is the difference to MAGM in the same table.",
    ),
    "Memory": (
        "Jobs of one kind take exactly the same memory here each time, so that what was learned of a kind is always "
        "right for the next one; real runs differ, for which the bound leaves a tenth. How many jobs are of a kind "
        "that ran before decides what learning brings: on HotCloud there are 18 kinds, on RAD-RM 35.",
        "A peak is measured without error, and none grows after its first minute. So no running job ever takes more "
        "than it is counted with once it was measured, by construction: how often that happens in reality, and what it "
        "costs the job or its neighbours, is not in these tables. Nor is whether real jobs show their peak in the "
        "first minute and a half; those that only load their data meanwhile do not count as still (they keep no GPU "
        "busy), and here every job works at once.",
        "Whoever has too little memory dies after exactly a minute, alone: in reality it may take a neighbour with it. "
        "Memory in pieces is lost where `--fragmentation` says so, and above where what is assumed is otherwise; in no "
        "other table.",
        "Blind policies see a newcomer's whole memory as soon as their monitor does; real jobs grow.",
        "What true memory brings on HotCloud is a third tenant: while jobs wait a GPU has 2.2 of them, and 2.7 where "
        "it is known (first three seeds, an earlier version). Three jobs of 2.2 to 2.6 GiB fit into 8 GiB, and do not"
        " with a tenth more for each; they end sooner in the mean, but the last of them hardly. That tenth is not "
        "given up: of Lucid's 676 pairs one in ten took over a tenth more memory together than both had taken alone, "
        "though half of them differed by less than half a percent.",
    ),
    "Workloads": (
        "HotCloud's jobs stand for 18 measured profiles of three models, not for its 13 architectures; their order and "
        "durations are drawn. Speed is an RTX 3090's with an RTX 2080's memory.",
        "The length of the transformers' samples on RAD-RM is not published: predictions are for 512 tokens, the most "
        "that BERT takes, and AdamW.",
        "RAD-RM's SM activity is assumed to be the same for all batch sizes of a model on ImageNet or text, so that "
        "what one size shows is exactly right for the others by construction: what learning from other sizes brings "
        "there, and what true activity is worth beside it, is the simulator's own assumption.",
        "On Alibaba's pods and on Philly's jobs nothing is learned, because no job of theirs says what it trains; on "
        "Alibaba's pods nothing is measured, either: what they declare is taken for the truth. Their lines of Carpool "
        "are the default's decisions without what it learns. Philly's jobs have HotCloud's profiles at random, and its "
        "clusters were larger than what ran on them: hardly anybody waits, so that little can be gained.",
    ),
    "What the tables can tell": (
        "Several choices (how a job that died is tried again, which limits are shown, that a running job's own peak "
        "counts in two steps, that first runs count with more by turns, that of jobs that came together the longest "
        "and the shortest take turns) were made after seeing results on these seeds. "
        "The deaths that a first run's factor ever prevented here were of one kind of job, 2% above the bound of an "
        "earlier memory model, and by turns of two, 17 and 31% above theirs, and of a neighbour: that nobody dies is "
        "evidence for these.",
        "A makespan is the end of one job, often of one that began last, and few decisions make it. Lines that differ "
        "by a few percent are mostly alike: the tables of differences on the same seed say how well each is known, and "
        "those with one seed cannot. Who looks for the best of many lines finds one by chance, too.",
        "With failures even more so: three earlier versions, the last of which counted running jobs with their own "
        "peaks, took 248.4 ± 48.4, 287.2 ± 80.5 and 248.7 ± 55.3 minutes on HotCloud's workloads and failures; the "
        "last difference is 38.5 minutes with a standard error of 18.0, half of it one seed. Whichever long job is "
        "killed late begins again and is the last to end.",
        "How many jobs are slowed beyond what they accept hangs on how well it is known how busy they are, and on how"
        " many share a GPU: on HotCloud, where jobs are learned and memory lets two or three together, it is few. On "
        f"larger GPUs, with gangs that wait for their slowest worker, or where nothing is learned, as of {OWN_TRACES}, "
        f"{FAR_MORE} were (60 jobs of such a trace on five GPUs; with true activity one in twenty).",
        "Where other assumptions were not tried for an experiment, the table that tells of them is missing.",
    ),
}
"""By what is doubted."""


def doubts() -> list[str]:
    """Write the section."""
    parts = ["## What to doubt in the simulator", ""]
    for subject, told in DOUBTS.items():
        parts += [f"### {subject}", "", *(f"- {one}" for one in told), ""]
    return parts
