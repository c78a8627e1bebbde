import time
def test_a(trained, script, monkeypatch, tmp_path):
    monkeypatch.chdir(trained.base)
    t=time.process_time()
    script("train_policy", "--data", trained.data, "--expmodel", trained.expmodel, "--out", tmp_path, "--iterations", 3, "--tasks", 2, "--rollouts", 3, "--eval-tasks", 4, "--imitation-episodes", 6, "--eval-every", 2, "--updates", 2)
    print("policy", time.process_time()-t)
    import subprocess; print(subprocess.run(["find", str(tmp_path)],capture_output=True,text=True).stdout)
