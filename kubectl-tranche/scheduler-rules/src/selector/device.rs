//! The variable `device` of a selector.

use std::collections::HashMap;
use std::sync::Arc;

use cel::ExecutionError;
use cel::common::traits::{Container, Indexer, Iterable, Sizer};
use cel::common::types::{CelBool, CelInt, CelList, CelMap, CelMapKey, CelString, Type};
use cel::common::value::{CowVal, Val};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};
use semver::Version;
use tranche_api::Quantity;

use super::Fault;
use super::extra::{Amount, Semver};

type Boxed = Box<dyn Val>;
type Entries = HashMap<CelMapKey<'static>, Boxed>;

pub(super) fn variable(driver: &str, device: &Device) -> Result<CelMap<'static>, Fault> {
    let mut attributes = HashMap::new();
    for (name, attribute) in device.attributes.iter().flatten() {
        let value = attribute_value(attribute)
            .map_err(|problem| Fault::Runtime(format!("attribute {name}: {problem}")))?;
        add(&mut attributes, driver, name, value);
    }
    let mut capacity = HashMap::new();
    for (name, amount) in device.capacity.iter().flatten() {
        let amount = Quantity::try_from(&amount.value)
            .map_err(|error| Fault::Unjudged(format!("capacity {name}: {error}")))?;
        add(&mut capacity, driver, name, Box::new(Amount(amount)));
    }
    let shareable = device.allow_multiple_allocations == Some(true);
    let fields: [(&str, Boxed); 4] = [
        ("driver", text(driver)),
        (
            "allowMultipleAllocations",
            Box::new(CelBool::from(shareable)),
        ),
        ("attributes", Box::new(Domains::new(attributes))),
        ("capacity", Box::new(Domains::new(capacity))),
    ];
    let fields = fields.map(|(name, value)| (CelMapKey::from(name), value));
    Ok(CelMap::from(Entries::from(fields)))
}

fn text(text: &str) -> Boxed {
    Box::new(CelString::from(text.to_owned()))
}

/// A name without a domain has the driver's domain.
fn add(domains: &mut HashMap<String, Entries>, driver: &str, name: &str, value: Boxed) {
    let (domain, name) = name.split_once('/').unwrap_or((driver, name));
    let names = domains.entry(domain.to_owned()).or_default();
    names.insert(CelMapKey::from(name.to_owned()), value);
}

fn attribute_value(attribute: &DeviceAttribute) -> Result<Boxed, String> {
    let version = |text: &String| -> Result<Boxed, String> {
        let version = Version::parse(text).map_err(|error| format!("{text:?}: {error}"));
        Ok(Box::new(Semver(version?)))
    };
    let int = |int: &i64| -> Boxed { Box::new(CelInt::from(*int)) };
    let bool = |bool: &bool| -> Boxed { Box::new(CelBool::from(*bool)) };
    let list = |values: Vec<Boxed>| -> Boxed { Box::new(CelList::from(values)) };
    let it = attribute;
    if let Some(ints) = &it.ints {
        Ok(list(ints.iter().map(int).collect()))
    } else if let Some(bools) = &it.bools {
        Ok(list(bools.iter().map(bool).collect()))
    } else if let Some(strings) = &it.strings {
        Ok(list(strings.iter().map(|it| text(it)).collect()))
    } else if let Some(versions) = &it.versions {
        let versions = versions.iter().map(version);
        versions.collect::<Result<_, _>>().map(list)
    } else if let Some(value) = &it.int {
        Ok(int(value))
    } else if let Some(value) = &it.bool {
        Ok(bool(value))
    } else if let Some(value) = &it.string {
        Ok(text(value))
    } else if let Some(value) = &it.version {
        version(value)
    } else {
        Err("it has no value".to_owned())
    }
}

/// A map from domains to maps of names. A domain that it does not contain gives an empty map.
#[derive(Clone, Debug)]
struct Domains(Arc<(CelMap<'static>, CelMap<'static>)>);

impl Domains {
    fn new(domains: HashMap<String, Entries>) -> Self {
        let domains = domains.into_iter().map(|(domain, names)| {
            let names: Boxed = Box::new(CelMap::from(names));
            (CelMapKey::from(domain), names)
        });
        let known = CelMap::from(domains.collect::<Entries>());
        Self(Arc::new((known, CelMap::default())))
    }

    fn known(&self) -> &CelMap<'static> {
        &self.0.0
    }
}

impl Val for Domains {
    fn get_type(&self) -> &Type {
        Self::cel_type()
    }

    fn cel_type() -> &'static Type {
        CelMap::cel_type()
    }

    fn as_container(&self) -> Option<&dyn Container> {
        self.known().as_container()
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_iterable<'b, 'v>(&'b self) -> Option<&'b (dyn Iterable + 'v)>
    where
        Self: 'v,
    {
        self.known().as_iterable()
    }

    fn as_sizer(&self) -> Option<&dyn Sizer> {
        self.known().as_sizer()
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(self.clone())
    }
}

impl Indexer for Domains {
    fn get<'b, 'v>(&'b self, domain: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        match self.known().get(domain) {
            Err(ExecutionError::NoSuchKey(_)) => Ok(CowVal::Borrowed(&self.0.1)),
            found => found,
        }
    }

    fn steal<'v>(self: Box<Self>, domain: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.get(domain).map(CowVal::into_owned)
    }
}
