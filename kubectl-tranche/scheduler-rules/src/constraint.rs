//! Constraints between the devices of a claim.

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceConstraint};

/// A constraint, and the attributes of the devices that were added.
#[derive(Debug)]
pub(super) struct Constraint<'a> {
    kind: Kind,
    attribute: &'a str,
    /// The requests that it applies to; empty for all.
    requests: &'a [String],
    added: Vec<&'a DeviceAttribute>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Match,
    Distinct,
}

impl<'a> Constraint<'a> {
    /// `None` for a kind that this release does not know.
    pub fn read(constraint: &'a DeviceConstraint) -> Option<Self> {
        let (kind, attribute) = match (&constraint.match_attribute, &constraint.distinct_attribute)
        {
            (Some(attribute), _) => (Kind::Match, attribute),
            (None, Some(attribute)) => (Kind::Distinct, attribute),
            (None, None) => return None,
        };
        Some(Self {
            kind,
            attribute,
            requests: constraint.requests.as_deref().unwrap_or_default(),
            added: Vec::new(),
        })
    }

    /// As a user writes it.
    pub fn text(&self) -> String {
        let kind = match self.kind {
            Kind::Match => "matchAttribute",
            Kind::Distinct => "distinctAttribute",
        };
        format!("{kind} {}", self.attribute)
    }

    /// Adds a device, if the constraint allows it.
    pub fn add(
        &mut self,
        request: &str,
        alternative: Option<&str>,
        driver: &str,
        device: &'a Device,
    ) -> bool {
        if !self.concerns(request, alternative) {
            return true;
        }
        let Some(attribute) = self::attribute(device, driver, self.attribute) else {
            return false;
        };
        let same = |other: &&DeviceAttribute| equal(attribute, other);
        let allowed = match self.kind {
            Kind::Match => self.added.first().is_none_or(same),
            Kind::Distinct => {
                self.added.is_empty() || is_single(attribute) && !self.added.iter().any(same)
            }
        };
        if allowed {
            self.added.push(attribute);
        }
        allowed
    }

    /// Takes back the device that was added last.
    pub fn remove(&mut self, request: &str, alternative: Option<&str>) {
        if self.concerns(request, alternative) {
            self.added.pop();
        }
    }

    fn concerns(&self, request: &str, alternative: Option<&str>) -> bool {
        let named = |own: &String| match own.split_once('/') {
            None => own == request,
            Some((main, sub)) => main == request && Some(sub) == alternative,
        };
        self.requests.is_empty() || self.requests.iter().any(named)
    }
}

/// An attribute by its full name. A name without a domain has the driver's domain.
fn attribute<'a>(device: &'a Device, driver: &str, name: &str) -> Option<&'a DeviceAttribute> {
    let attributes = device.attributes.as_ref()?;
    attributes.get(name).or_else(|| {
        let (domain, own) = name.split_once('/')?;
        attributes.get(own).filter(|_| domain == driver)
    })
}

/// Lists never match: comparing them is an alpha feature.
fn is_single(attribute: &DeviceAttribute) -> bool {
    attribute.string.is_some()
        || attribute.int.is_some()
        || attribute.bool.is_some()
        || attribute.version.is_some()
}

fn equal(one: &DeviceAttribute, other: &DeviceAttribute) -> bool {
    match one {
        DeviceAttribute {
            string: Some(own), ..
        } => other.string.as_ref() == Some(own),
        DeviceAttribute { int: Some(own), .. } => other.int == Some(*own),
        DeviceAttribute {
            bool: Some(own), ..
        } => other.bool == Some(*own),
        DeviceAttribute {
            version: Some(own), ..
        } => other.version.as_ref() == Some(own),
        _ => false,
    }
}
