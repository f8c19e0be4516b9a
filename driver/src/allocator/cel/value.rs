//! The values of CEL, with those that Kubernetes adds.

use std::cmp::Ordering;
use std::rc::Rc;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};
use semver::Version;
use tranche_api::Quantity;

/// Why a selector has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The scheduler fails in the same way, and allocates nothing.
    #[error("{0}")]
    Runtime(String),
    /// The scheduler may have an answer, but this program has none.
    #[error("{0}")]
    Unjudged(String),
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    Text(Rc<str>),
    List(Rc<[Value]>),
    Map(Rc<Map>),
    Quantity(Quantity),
    Semver(Rc<Version>),
    Optional(Option<Rc<Value>>),
}

/// A map; of few entries, and with keys of any type.
#[derive(Debug, Default)]
pub(super) struct Map {
    pub entries: Vec<(Value, Value)>,
    /// What a key selects that is not there.
    pub otherwise: Option<Value>,
}

impl Map {
    pub fn named(entries: Vec<(&str, Value)>) -> Self {
        let entries = entries
            .into_iter()
            .map(|(key, value)| (Value::text(key), value));
        Self {
            entries: entries.collect(),
            otherwise: None,
        }
    }

    /// What a key selects.
    pub fn get(&self, key: &Value) -> Option<&Value> {
        self.own(key).or(self.otherwise.as_ref())
    }

    /// The entry of a key.
    pub fn own(&self, key: &Value) -> Option<&Value> {
        let entry = self.entries.iter().find(|(own, _)| own.equals(key));
        entry.map(|(_, value)| value)
    }
}

impl Value {
    pub fn text(text: &str) -> Self {
        Self::Text(text.into())
    }

    /// The type's name, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Uint(_) => "a uint",
            Self::Double(_) => "a double",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
            Self::Quantity(_) => "a quantity",
            Self::Semver(_) => "a semantic version",
            Self::Optional(_) => "an optional",
        }
    }

    /// `==`: values of different types are different, but numbers compare by value.
    pub fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Text(a), Self::Text(b)) => a == b,
            (Self::List(a), Self::List(b)) => {
                a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a.equals(b))
            }
            (Self::Map(a), Self::Map(b)) => {
                let same = |(key, value): &(Value, Value)| {
                    b.own(key).is_some_and(|other| other.equals(value))
                };
                a.entries.len() == b.entries.len() && a.entries.iter().all(same)
            }
            (Self::Optional(a), Self::Optional(b)) => match (a, b) {
                (Some(a), Some(b)) => a.equals(b),
                (a, b) => a.is_none() && b.is_none(),
            },
            (Self::Semver(a), Self::Semver(b)) => a.cmp_precedence(b) == Ordering::Equal,
            _ => self.order(other) == Some(Ordering::Equal),
        }
    }

    /// `<` and the like; `None` where CEL has no order.
    pub fn order(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Bool(a), Self::Bool(b)) => Some(a.cmp(b)),
            (Self::Text(a), Self::Text(b)) => Some(a.cmp(b)),
            (Self::Quantity(a), Self::Quantity(b)) => Some(a.cmp(b)),
            (Self::Semver(a), Self::Semver(b)) => Some(a.cmp_precedence(b)),
            (Self::Double(a), b) => a.partial_cmp(&b.float()?),
            (a, Self::Double(b)) => a.float()?.partial_cmp(b),
            (a, b) => Some(a.integer()?.cmp(&b.integer()?)),
        }
    }

    fn integer(&self) -> Option<i128> {
        match self {
            Self::Int(int) => Some(i128::from(*int)),
            Self::Uint(uint) => Some(i128::from(*uint)),
            _ => None,
        }
    }

    #[allow(
        clippy::cast_precision_loss,
        reason = "CEL compares an int with a double as doubles"
    )]
    fn float(&self) -> Option<f64> {
        match self {
            Self::Double(double) => Some(*double),
            other => other.integer().map(|integer| integer as f64),
        }
    }
}

/// The variable `device` of a selector.
pub(super) fn device(driver: &str, device: &Device) -> Result<Value, Fault> {
    let mut attributes = Domains::default();
    for (name, attribute) in device.attributes.iter().flatten() {
        let value = attribute_value(attribute)
            .map_err(|problem| Fault::Runtime(format!("attribute {name}: {problem}")))?;
        attributes.add(driver, name, value);
    }
    let mut capacity = Domains::default();
    for (name, amount) in device.capacity.iter().flatten() {
        let amount = Quantity::try_from(&amount.value)
            .map_err(|error| Fault::Unjudged(format!("capacity {name}: {error}")))?;
        capacity.add(driver, name, Value::Quantity(amount));
    }
    let shareable = device.allow_multiple_allocations == Some(true);
    Ok(Value::Map(Rc::new(Map::named(vec![
        ("driver", Value::text(driver)),
        ("allowMultipleAllocations", Value::Bool(shareable)),
        ("attributes", attributes.value()),
        ("capacity", capacity.value()),
    ]))))
}

/// A map of domains to maps of names.
#[derive(Default)]
struct Domains(Vec<(Value, Vec<(Value, Value)>)>);

impl Domains {
    /// A name without a domain is of the driver's.
    fn add(&mut self, driver: &str, name: &str, value: Value) {
        let (domain, name) = name.split_once('/').unwrap_or((driver, name));
        let entry = (Value::text(name), value);
        let domain = Value::text(domain);
        match self.0.iter_mut().find(|(own, _)| own.equals(&domain)) {
            Some((_, entries)) => entries.push(entry),
            None => self.0.push((domain, vec![entry])),
        }
    }

    fn value(self) -> Value {
        let map = |entries| {
            Value::Map(Rc::new(Map {
                entries,
                otherwise: None,
            }))
        };
        let entries = self.0.into_iter();
        Value::Map(Rc::new(Map {
            entries: entries
                .map(|(domain, names)| (domain, map(names)))
                .collect(),
            otherwise: Some(map(Vec::new())),
        }))
    }
}

fn attribute_value(attribute: &DeviceAttribute) -> Result<Value, String> {
    let version = |text: &str| {
        let version = Version::parse(text).map_err(|error| format!("{text:?}: {error}"));
        version.map(|version| Value::Semver(Rc::new(version)))
    };
    let list = |values: Vec<Value>| Ok(Value::List(values.into()));
    match attribute {
        DeviceAttribute {
            ints: Some(ints), ..
        } => list(ints.iter().copied().map(Value::Int).collect()),
        DeviceAttribute {
            bools: Some(bools), ..
        } => list(bools.iter().copied().map(Value::Bool).collect()),
        DeviceAttribute {
            strings: Some(strings),
            ..
        } => list(strings.iter().map(|text| Value::text(text)).collect()),
        DeviceAttribute {
            versions: Some(versions),
            ..
        } => {
            let values = versions.iter().map(|text| version(text));
            list(values.collect::<Result<_, _>>()?)
        }
        DeviceAttribute { int: Some(int), .. } => Ok(Value::Int(*int)),
        DeviceAttribute {
            bool: Some(bool), ..
        } => Ok(Value::Bool(*bool)),
        DeviceAttribute {
            string: Some(string),
            ..
        } => Ok(Value::text(string)),
        DeviceAttribute {
            version: Some(text),
            ..
        } => version(text),
        _ => Err("it has no value".to_owned()),
    }
}
