//! The decision tree, as data: `docs/choosing.md` has the same tree.

use std::fmt::Write as _;

/// A question of the tree.
#[derive(Debug)]
pub struct Question {
    /// Its name on the command line.
    pub name: &'static str,
    pub text: &'static str,
    pub choices: &'static [Choice],
}

/// An answer, and what follows.
#[derive(Debug)]
pub struct Choice {
    /// Its name on the command line.
    pub answer: &'static str,
    pub meaning: &'static str,
    /// What follows.
    pub next: Next,
}

/// What follows an answer.
#[derive(Clone, Copy, Debug)]
pub enum Next {
    /// Another question.
    Ask(&'static Question),
    Leaf(&'static Leaf),
}

#[derive(Debug, PartialEq, Eq)]
pub struct Leaf {
    pub class: &'static str,
    pub why: &'static str,
    /// What to know before.
    pub traps: &'static [&'static str],
    /// Whether a claim of the class names memory.
    pub has_memory: bool,
    /// Whether a claim of the class names cores.
    pub has_cores: bool,
}

const MPS_FAULTS: &str =
    "a fatal fault of one client of MPS ends the work of all that share the GPU with it";
const LONG_KERNEL: &str = "a running kernel cannot be interrupted: a neighbour's kernel of one second delays yours by up to a second";
const NO_MIG: &str = "GPUs such as T4, L4, A10 and V100 have no partitions: a claim for one would wait for ever on them";
const COOPERATIVE: &str = "the cap holds programs that use CUDA; code that tries to go around it is detected, not stopped";

static PASSTHROUGH: Leaf = Leaf {
    class: "passthrough.gpu.tranche.dev",
    why: "A virtual machine gets a whole GPU, by VFIO.",
    traps: &["the node needs an IOMMU, and the GPU's group must have no other device"],
    has_memory: false,
    has_cores: false,
};

static HARD: Leaf = Leaf {
    class: "hard.gpu.tranche.dev",
    why: "Regulated data and code that you do not trust belong behind hardware: a partition or a whole GPU, never software.",
    traps: &[NO_MIG_HARD],
    has_memory: true,
    has_cores: false,
};
const NO_MIG_HARD: &str =
    "on GPUs without MIG, such as T4, L4, A10 and V100, the class gives whole GPUs";

static EXCLUSIVE: Leaf = Leaf {
    class: "exclusive.gpu.tranche.dev",
    why: "A workload that fills a GPU, or must not wait for anybody's kernel, gets a whole one.",
    traps: &[],
    has_memory: false,
    has_cores: false,
};

static PARTITION: Leaf = Leaf {
    class: "partition.gpu.tranche.dev",
    why: "A bound on latency needs multiprocessors of its own: a MIG instance, which no neighbour slows down.",
    traps: &[
        NO_MIG,
        "partitions have a few sizes: a claim for 22Gi of an H100 gets 40 GB",
    ],
    has_memory: true,
    has_cores: false,
};

static CAPPED_LATENCY: Leaf = Leaf {
    class: "capped.gpu.tranche.dev",
    why: "Without MIG, a share with cores of its own keeps its part of the GPU's time while neighbours' kernels are short.",
    traps: &[LONG_KERNEL, COOPERATIVE],
    has_memory: true,
    has_cores: true,
};

static CAPPED: Leaf = Leaf {
    class: "capped.gpu.tranche.dev",
    why: "An amount of memory and a part of the time, of any size, on any GPU; a neighbour's fault does not matter.",
    traps: &[LONG_KERNEL, COOPERATIVE],
    has_memory: true,
    has_cores: true,
};

static CONCURRENT: Leaf = Leaf {
    class: "concurrent.gpu.tranche.dev",
    why: "Small kernels of programs that trust each other run at the same time, by MPS.",
    traps: &[
        MPS_FAULTS,
        "MPS needs a GPU of the Volta generation or later",
    ],
    has_memory: true,
    has_cores: true,
};

static TIMESHARED: Leaf = Leaf {
    class: "timeshared.gpu.tranche.dev",
    why: "The driver's own time slices, without any limit: for bursts and demonstrations among pods that trust each other.",
    traps: &[
        "one pod can take all memory of the GPU, and the others then fail",
        "there is no bound on latency: never for a service with one",
    ],
    has_memory: false,
    has_cores: false,
};

static FAULTS: Question = Question {
    name: "faults",
    text: "May a fault of one of the programs end all of them?",
    choices: &[
        Choice {
            answer: "shared",
            meaning: "yes: they are replicas that start again together",
            next: Next::Leaf(&CONCURRENT),
        },
        Choice {
            answer: "own",
            meaning: "no",
            next: Next::Leaf(&CAPPED),
        },
    ],
};

static SHARING: Question = Question {
    name: "sharing",
    text: "How does it use the GPU?",
    choices: &[
        Choice {
            answer: "amount",
            meaning: "an amount of memory and a part of the time: notebooks, inference, training of small models, CI",
            next: Next::Leaf(&CAPPED),
        },
        Choice {
            answer: "replicas",
            meaning: "small kernels that leave most of the GPU idle, beside programs that it trusts",
            next: Next::Ask(&FAULTS),
        },
        Choice {
            answer: "bursts",
            meaning: "now and then, with the driver untouched and no limits",
            next: Next::Leaf(&TIMESHARED),
        },
    ],
};

static KERNELS: Question = Question {
    name: "kernels",
    text: "Do neighbours run single kernels that take longer than the latency may be?",
    choices: &[
        Choice {
            answer: "long",
            meaning: "yes, or nobody knows: a running kernel cannot be interrupted",
            next: Next::Leaf(&EXCLUSIVE),
        },
        Choice {
            answer: "short",
            meaning: "no",
            next: Next::Leaf(&CAPPED_LATENCY),
        },
    ],
};

static GPU: Question = Question {
    name: "gpu",
    text: "Can its GPUs be partitioned (A30, A100, H100 and newer)?",
    choices: &[
        Choice {
            answer: "mig",
            meaning: "yes",
            next: Next::Leaf(&PARTITION),
        },
        Choice {
            answer: "no-mig",
            meaning: "no: T4, L4, A10, V100, and those of workstations",
            next: Next::Ask(&KERNELS),
        },
    ],
};

static LATENCY: Question = Question {
    name: "latency",
    text: "Is there a bound on its latency, such as a P99?",
    choices: &[
        Choice {
            answer: "p99",
            meaning: "yes",
            next: Next::Ask(&GPU),
        },
        Choice {
            answer: "none",
            meaning: "no",
            next: Next::Ask(&SHARING),
        },
    ],
};

static SIZE: Question = Question {
    name: "size",
    text: "Does it need a whole GPU?",
    choices: &[
        Choice {
            answer: "whole",
            meaning: "yes: it fills the memory, or needs NVLink or a profiler",
            next: Next::Leaf(&EXCLUSIVE),
        },
        Choice {
            answer: "part",
            meaning: "no",
            next: Next::Ask(&LATENCY),
        },
    ],
};

static DATA: Question = Question {
    name: "data",
    text: "Does it have regulated data, or run code that you do not trust, or must it be safe from such code?",
    choices: &[
        Choice {
            answer: "regulated",
            meaning: "yes",
            next: Next::Leaf(&HARD),
        },
        Choice {
            answer: "trusted",
            meaning: "no: the teams trust each other",
            next: Next::Ask(&SIZE),
        },
    ],
};

static MACHINE: Question = Question {
    name: "machine",
    text: "Is it a virtual machine?",
    choices: &[
        Choice {
            answer: "virtual",
            meaning: "yes, of KubeVirt",
            next: Next::Leaf(&PASSTHROUGH),
        },
        Choice {
            answer: "container",
            meaning: "no",
            next: Next::Ask(&DATA),
        },
    ],
};

pub const START: Next = Next::Ask(&MACHINE);

/// All questions, in the order in which they are asked.
pub static TREE: [&Question; 8] = [
    &MACHINE, &DATA, &SIZE, &LATENCY, &GPU, &KERNELS, &SHARING, &FAULTS,
];

/// The tree as a list in Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::new();
    for (number, question) in TREE.iter().enumerate() {
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "{}. **{}** (`{}`)",
            number + 1,
            question.text,
            question.name
        );
        for choice in question.choices {
            let next = match choice.next {
                Next::Ask(next) => format!("question {}", place(next)),
                Next::Leaf(leaf) => format!("`{}`", leaf.class),
            };
            let _ = writeln!(
                text,
                "   - `{}`: {} → {next}",
                choice.answer, choice.meaning
            );
        }
    }
    text
}

fn place(question: &Question) -> usize {
    let mut tree = TREE.iter();
    tree.position(|it| it.name == question.name)
        .map_or(0, |index| index + 1)
}
