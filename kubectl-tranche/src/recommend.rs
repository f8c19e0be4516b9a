//! `recommend`: finds a tier and a claim to apply from answers.

mod claim;
mod pod;
mod tree;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::output::{Block, Tone, View};

pub use claim::{Size, SizeError, yaml};
pub use pod::{PodAnswers, of_pod};
pub use tree::{Choice, Leaf, Next, Question, START, TREE, markdown};

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Recommendation {
    pub class: &'static str,
    pub why: &'static str,
    /// What to know before.
    pub traps: Vec<&'static str>,
    /// The questions and their answers, in order.
    pub answers: Path,
    /// What to apply.
    pub yaml: String,
}

/// Why answers give no recommendation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// Not `QUESTION=ANSWER`.
    #[error("{0:?} is not an answer: write QUESTION=ANSWER, such as size=part")]
    Syntax(String),
    /// A question that the tree does not have.
    #[error("there is no question {name:?}: the questions are {known}")]
    Question {
        name: String,
        /// The questions that exist.
        known: String,
    },
    /// An answer that the question does not have.
    #[error("{question}={answer} is no answer: {known}")]
    Answer {
        question: &'static str,
        answer: String,
        /// The answers that exist.
        known: String,
    },
    /// A question that nobody answered.
    #[error("unanswered: {text} Add {known}")]
    Missing { text: &'static str, known: String },
    /// Questions that nobody answered, off a terminal.
    #[error("unanswered: {questions}\nadd the answers, such as {example}")]
    AllMissing {
        /// A line for each question that may follow, in order.
        questions: String,
        /// The first question's first answer.
        example: String,
    },
    /// The pod has no GPU of ours.
    #[error(
        "pod {namespace}/{pod} holds no GPU by a claim: check its name and --namespace, or answer the questions without --pod"
    )]
    NoPod { namespace: String, pod: String },
    /// The terminal cannot be read.
    #[error("cannot read the answer: {0}")]
    Read(String),
}

/// Answers by question.
pub type Answers = BTreeMap<&'static str, &'static str>;

/// The questions and their answers, in the order in which they were asked.
pub type Path = Vec<(String, String)>;

/// Reads `QUESTION=ANSWER`.
pub fn read(words: &[String]) -> Result<Answers, AnswerError> {
    let mut answers = Answers::new();
    for word in words {
        let (name, answer) = word
            .split_once('=')
            .ok_or_else(|| AnswerError::Syntax(word.clone()))?;
        let question =
            TREE.iter()
                .find(|it| it.name == name)
                .ok_or_else(|| AnswerError::Question {
                    name: name.to_owned(),
                    known: names(TREE.iter().map(|it| it.name)),
                })?;
        answers.insert(question.name, question.choice(answer)?.answer);
    }
    Ok(answers)
}

fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

impl Question {
    /// The choice of an answer.
    pub fn choice(&self, answer: &str) -> Result<&'static Choice, AnswerError> {
        let mut choices = self.choices.iter();
        let found = choices.find(|choice| choice.answer == answer);
        found.ok_or_else(|| AnswerError::Answer {
            question: self.name,
            answer: answer.to_owned(),
            known: self.known(),
        })
    }

    /// Its answers as users write them, with their meaning.
    #[must_use]
    pub fn known(&self) -> String {
        let choices: Vec<_> = self
            .choices
            .iter()
            .map(|it| format!("{}={} ({})", self.name, it.answer, it.meaning))
            .collect();
        choices.join(" or ")
    }
}

/// Walks the tree. `ask` answers the questions that `given` does not answer.
pub fn walk(
    given: &Answers,
    mut ask: impl FnMut(&Question) -> Result<&'static Choice, AnswerError>,
) -> Result<(&'static Leaf, Path), AnswerError> {
    let mut path = Vec::new();
    let mut next = START;
    loop {
        let question = match next {
            Next::Leaf(leaf) => return Ok((leaf, path)),
            Next::Ask(question) => question,
        };
        let choice = match given.get(question.name) {
            Some(answer) => question.choice(answer)?,
            None => ask(question)?,
        };
        path.push((question.name.to_owned(), choice.answer.to_owned()));
        next = choice.next;
    }
}

/// The error where no user can answer.
pub fn missing(question: &Question) -> Result<&'static Choice, AnswerError> {
    Err(AnswerError::Missing {
        text: question.text,
        known: question.known(),
    })
}

/// The same, with all questions that may follow, so that a script needs one run and not one for each.
pub fn all_missing(question: &Question) -> Result<&'static Choice, AnswerError> {
    let mut names = vec![question.name];
    for it in TREE {
        if names.contains(&it.name) {
            let next = it.choices.iter().filter_map(|choice| match choice.next {
                Next::Ask(next) => Some(next.name),
                Next::Leaf(_) => None,
            });
            names.extend(next);
        }
    }
    let asked = TREE.iter().filter(|it| names.contains(&it.name));
    let lines: Vec<String> = asked
        .map(|it| {
            let choices = it.choices.iter().map(|choice| {
                let then = match choice.next {
                    Next::Ask(next) => format!("; then {}", next.name),
                    Next::Leaf(_) => String::new(),
                };
                format!(
                    "\n    {}={}: {}{then}",
                    it.name, choice.answer, choice.meaning
                )
            });
            format!("\n  {}{}", it.text, choices.collect::<String>())
        })
        .collect();
    let first = question.choices.first().map(|it| it.answer);
    Err(AnswerError::AllMissing {
        questions: lines.concat(),
        example: format!("{}={}", question.name, first.unwrap_or_default()),
    })
}

#[must_use]
pub fn recommend(
    leaf: &'static Leaf,
    answers: Path,
    name: &str,
    namespace: Option<&str>,
    size: Size,
) -> Recommendation {
    Recommendation {
        class: leaf.class,
        why: leaf.why,
        traps: leaf.traps.to_vec(),
        answers,
        yaml: yaml(leaf, name, namespace, size),
    }
}

impl View for Recommendation {
    /// All lines except the YAML are comments, so that users can pipe the output into `kubectl apply --filename -`.
    fn blocks(&self, _: bool) -> Vec<Block> {
        let mut blocks = vec![
            Block::Line(Tone::Heading, format!("# {}", self.class)),
            Block::plain(format!("# {}", self.why)),
        ];
        let traps = self.traps.iter();
        blocks.extend(traps.map(|trap| Block::Line(Tone::Warning, format!("# Note: {trap}"))));
        blocks.extend(self.yaml.lines().map(Block::plain));
        blocks
    }
}

#[cfg(test)]
mod tests;
