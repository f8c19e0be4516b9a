// Package oracle judges the CDI specs in driver/testdata with the library that containerd, CRI-O and Podman read them with.
// The unit tests of tranche-driver hold these files to what it writes.
package oracle

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// The versions of CDI, in order.
var versions = []string{"0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"}

// A claim, one whose UID begins with a digit on a node with a containerised driver, and the driver.
var files = []string{"cdi-claim.json", "cdi-claim-digit.json", "cdi-driver.json"}

type spec = map[string]any

func read(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func decode(t *testing.T, name string) spec {
	t.Helper()
	var decoded spec
	if err := json.Unmarshal(read(t, name), &decoded); err != nil {
		t.Fatal(err)
	}
	return decoded
}

// load lets the library read a spec from a file, as a runtime does.
func load(t *testing.T, it spec) (*cdi.Spec, error) {
	t.Helper()
	text, err := json.Marshal(it)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "spec.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return cdi.ReadSpec(path, 0)
}

func TestWhatWeWriteIsTakenUnderTheNamesThatTheKubeletIsTold(t *testing.T) {
	folder := t.TempDir()
	for _, file := range files {
		if err := os.WriteFile(filepath.Join(folder, file), read(t, file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(folder), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		t.Fatal(errs)
	}
	names := cache.ListDevices()
	for _, expected := range []string{
		"gpu.tranche.dev/claim=uid-of-a-gpu-0",
		"gpu.tranche.dev/claim=uid-of-a-whole-1",
		"gpu.tranche.dev/claim=0f4a3c1e-6f55-4b6a-9a3d-2d7f8f0b1c2d-gpu-0",
		"gpu.tranche.dev/driver=full",
		"gpu.tranche.dev/driver=capped",
	} {
		if !slices.Contains(names, expected) {
			t.Errorf("%s is none of %v", expected, names)
		}
	}
}

func TestNoLowerVersionWouldDo(t *testing.T) {
	lowered := false
	for _, file := range files {
		it := decode(t, file)
		own := it["cdiVersion"].(string)
		position := slices.Index(versions, own)
		if position < 0 {
			t.Fatalf("%s: version %s is not known here", file, own)
		}
		lowered = lowered || own == "0.5.0"
		for index, version := range versions {
			it["cdiVersion"] = version
			_, err := load(t, it)
			if index >= position {
				if err != nil {
					t.Errorf("%s as %s: %v", file, version, err)
				}
			} else if err == nil || !strings.Contains(err.Error(), "version") {
				t.Errorf("%s as %s instead of %s: %v", file, version, own, err)
			}
		}
	}
	if !lowered {
		t.Error("no spec has a version below the newest")
	}
}

func TestUnknownFieldsAndEmptyDevicesAreRefused(t *testing.T) {
	for _, file := range files {
		it := decode(t, file)
		device := it["devices"].([]any)[0].(spec)
		device["containerEdits"].(spec)["novelty"] = 1
		if _, err := load(t, it); err == nil || !strings.Contains(err.Error(), "novelty") {
			t.Errorf("%s with an unknown field: %v", file, err)
		}
		device["containerEdits"] = spec{}
		if _, err := load(t, it); err == nil {
			t.Errorf("%s with an empty device is taken", file)
		}
	}
}

// Each line is a device name and `yes` or `no`: whether we take it.
func TestNamesThatWeTakeAreTaken(t *testing.T) {
	taken := 0
	for line := range strings.Lines(string(read(t, "cdi-names.tsv"))) {
		name, ours, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		_, err := load(t, spec{
			"cdiVersion": "0.5.0",
			"kind":       "gpu.tranche.dev/claim",
			"devices":    []spec{{"name": name, "containerEdits": spec{"env": []string{"A=b"}}}},
		})
		switch {
		case ours == "yes" && err != nil:
			t.Errorf("%q: %v", name, err)
		case ours == "yes":
			taken++
		// We limit the length, CDI does not.
		case err == nil && len(name) <= 200:
			t.Errorf("%q is taken by the library", name)
		}
	}
	if taken <= 5 {
		t.Errorf("only %d names are taken", taken)
	}
}
